"""The sizes of a decoder that decide its speed, from a config.json of Hugging Face or from text.

A config is read by its model_type. KINDS has those whose layers are known, with the sizes that
transformers takes where a config leaves them out; tests/clients compares each with the model that
transformers builds. Any other is refused, as its fields may mean other layers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Part:
    """Linear layers that read one input: tokens x k, times each of the weights n x k.

    Attributes:
        name: what the layers are, for people.
        k, ns: the inputs, and the outputs of each layer.
        count: how many such parts the model has.
        experts: 0: dense; else the number of weights, of which each row of the input has one.
        rows: rows of the input per token of the batch.
        is_converted: whether a recipe applies; the head stays in bf16.
    """

    name: str
    k: int
    ns: tuple[int, ...]
    count: int
    experts: int = 0
    rows: int = 1
    is_converted: bool = True

    @property
    def weights(self) -> int:
        """The elements of one such part's weights."""
        return max(self.experts, 1) * self.k * sum(self.ns)


@dataclass(frozen=True)
class ModelSizes:
    """A decoder of Llama's kind: attention of grouped heads, gated feed-forwards or experts."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0  # of a model with experts: the blocks with a feed-forward instead
    tied: int = 0  # 1: the head multiplies by the embedding, and both are one parameter
    section: str = ""  # of a config, whose other sections are not predicted

    def parts(self) -> list[Part]:
        """Returns the linear layers, those of one input together."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found = [
            Part("q, k, v", self.hidden, (q, kv, kv), self.layers),
            Part("o", q, (self.hidden,), self.layers),
        ]
        sparse = self.sparse_layers
        forwards = [("", self.intermediate, self.layers - sparse)]
        forwards.append(("shared ", self.shared_intermediate, sparse))
        for kind, width, count in forwards:
            found.append(Part(f"{kind}gate, up", self.hidden, (width, width), count))
            found.append(Part(f"{kind}down", width, (self.hidden,), count))
        each = (self.experts, self.experts_per_token)
        width = self.expert_intermediate
        found.append(Part("experts' gate, up", self.hidden, (2 * width,), sparse, *each))
        found.append(Part("experts' down", width, (self.hidden,), sparse, *each))
        found.append(Part("head", self.hidden, (self.vocab,), 1, is_converted=False))
        return [part for part in found if part.count and part.k and sum(part.ns)]

    @property
    def sparse_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def other_weights(self) -> int:
        """The elements of the embedding; 0 where they are the head's."""
        return 0 if self.tied else self.vocab * self.hidden

    def gated_widths(self) -> int:
        """Returns the hidden widths that a token passes in all feed-forwards."""
        sparse = self.experts_per_token * self.expert_intermediate + self.shared_intermediate
        dense = (self.layers - self.sparse_layers) * self.intermediate
        return dense + self.sparse_layers * sparse


NAMES = [field.name for field in fields(ModelSizes) if field.name != "section"]
TEXT = ",".join(f"{name}=N" for name in NAMES)
ALWAYS = ("hidden", "intermediate", "layers", "heads", "vocab")
OF_EXPERTS = ("experts_per_token", "expert_intermediate", "shared_intermediate", "dense_layers")


def read_sizes(model: str) -> ModelSizes:
    """Reads the sizes of a model.

    Args:
        model: the path of a config.json, of a folder with one, or text such as
            "hidden=4096,intermediate=14336,layers=32,heads=32,kv_heads=8,vocab=128256".

    Raises:
        OSError: a file cannot be read.
        ValueError: a size is missing or no positive integer, or the model_type is not known.
    """
    if "=" in model and "/" not in model:
        return checked(parse_text(model), "--model")
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"--model: expected a config.json, a folder with one, or sizes as {TEXT}; got {model!r}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(config).__name__}")
    text = config.get("text_config")  # of a model with images, too
    if not isinstance(text, dict):
        return checked(read_config(str(path), config), str(path))
    if TIED in config:
        text = {TIED: config[TIED], **text}
    where = f"{path}: text_config"
    return checked({**read_config(where, text), "section": "text_config"}, where)


def parse_text(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in re.findall("[^,]+", text):
        name, _, value = (word.strip() for word in pair.partition("="))
        if name not in NAMES or not value.isdecimal() or name in found:
            raise ValueError(f"--model: expected sizes as {TEXT}; got {pair.strip()!r}")
        found[name] = int(value)
    return found


def checked(found: dict[str, Any], where: str) -> ModelSizes:
    """Fills in what may be left out, and checks that the sizes fit each other."""
    missing = [name for name in ALWAYS if not found.get(name)]
    if missing:
        got = ", ".join(f"{name}={value}" for name, value in found.items())
        raise ValueError(f"{where}: expected {', '.join(missing)} of at least 1, got {got}")
    heads, hidden = found["heads"], found["hidden"]
    kv_heads = found.setdefault("kv_heads", heads)
    if not kv_heads or heads % kv_heads:
        raise ValueError(
            f"{where}: expected heads as a multiple of kv_heads, got {heads} and {kv_heads}"
        )
    found["head_dim"] = found.get("head_dim") or hidden // heads
    if not found["head_dim"]:
        sizes = f"hidden {hidden} and heads {heads}"
        raise ValueError(f"{where}: expected no more heads than the hidden size, got {sizes}")
    if count := found.get("experts"):
        chosen, dense = found.get("experts_per_token", 0), found.get("dense_layers", 0)
        if not 1 <= chosen <= count:
            raise ValueError(f"{where}: expected experts_per_token in 1..{count}, got {chosen}")
        if dense > found["layers"]:
            raise ValueError(f"{where}: expected dense_layers in 0..{found['layers']}, got {dense}")
        found["expert_intermediate"] = found.get("expert_intermediate") or found["intermediate"]
    elif unread := [name for name in OF_EXPERTS if found.get(name)]:
        raise ValueError(f"{where}: expected experts beside {', '.join(unread)}, got none")
    if found.get("tied", 0) > 1:
        raise ValueError(f"{where}: expected tied as 0 or 1, got {found['tied']}")
    return ModelSizes(**found)


# ---- Configs of Hugging Face ---------------------------------------------------------------------
TIED = "tie_word_embeddings"
EXPERTS = {  # by model_type: the names that transformers reads; the first that is there
    "dots1": ("n_routed_experts", "num_local_experts"),
    "glm4_moe": ("n_routed_experts", "num_local_experts"),
    "llama4_text": ("num_local_experts",),
    "mixtral": ("num_local_experts", "num_experts"),
    "olmoe": ("num_experts", "num_local_experts"),
    "qwen2_moe": ("num_experts",),
    "qwen3_moe": ("num_experts", "num_local_experts"),
}


class Config(NamedTuple):
    """The fields of a config.

    Attributes:
        where: its name in an error.
        fields: what it has.
        defaults: what transformers takes for a size that is absent; 0 stands for null.
    """

    where: str
    fields: Mapping[str, Any]
    defaults: Mapping[str, int]

    def size(self, *names: str, least: int = 1) -> int:
        """Returns an integer, of the first name that is there; else the default."""
        given = [name for name in names if name in self.fields]
        absent = [name for name in names if name in self.defaults]
        if absent and not given:
            return self.defaults[absent[0]]
        name = given[0] if given else " or ".join(names)
        value = self.fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            got = "none" if value is None else repr(value)
            raise ValueError(
                f"{self.where}: expected {name} as an integer of at least {least}, got {got}; or "
                f"pass sizes instead: --model {TEXT}"
            )
        return value

    def blocks(self, name: str) -> set[int] | None:
        """Returns the numbers of blocks in a list; None where it is absent."""
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or any(not isinstance(i, int) for i in value):
            raise ValueError(f"{self.where}: expected {name} as a list of integers, got {value!r}")
        return {i for i in value if 0 <= i < self.size("num_hidden_layers")}


def read_experts(config: Config, width: str) -> dict[str, Any]:
    return {
        "experts": config.size(*EXPERTS[config.fields["model_type"]]),
        "experts_per_token": config.size("num_experts_per_tok"),
        "expert_intermediate": config.size(width),
    }


def read_mixtral(config: Config) -> dict[str, Any]:
    return read_experts(config, "intermediate_size")


def read_qwen3_moe(config: Config) -> dict[str, Any]:
    every, dense = config.size("decoder_sparse_step"), config.blocks("mlp_only_layers")
    blocks = range(config.size("num_hidden_layers"))
    count = sum(i in (dense or ()) or (i + 1) % every > 0 for i in blocks)
    return {**read_experts(config, "moe_intermediate_size"), "dense_layers": count}


def read_qwen2_moe(config: Config) -> dict[str, Any]:
    shared = config.size("shared_expert_intermediate_size", least=0)
    return {**read_qwen3_moe(config), "shared_intermediate": shared}


def read_glm4_moe(config: Config) -> dict[str, Any]:
    found = read_experts(config, "moe_intermediate_size")
    shared = config.size("n_shared_experts", least=0) * found["expert_intermediate"]
    dense = min(config.size("first_k_dense_replace", least=0), config.size("num_hidden_layers"))
    return {**found, "shared_intermediate": shared, "dense_layers": dense}


def read_llama4(config: Config) -> dict[str, Any]:
    found, blocks = read_mixtral(config), config.size("num_hidden_layers")
    sparse = config.blocks("moe_layers")
    if sparse is None:
        every = config.size("interleave_moe_layer_step")
        sparse = set(range(every - 1, blocks, every))
    return {
        **found,
        "intermediate": config.size("intermediate_size_mlp"),
        "shared_intermediate": found["expert_intermediate"],
        "dense_layers": blocks - len(sparse),
    }


class Kind(NamedTuple):
    """How the configs of a model_type are read.

    Attributes:
        sizes: the defaults of SIZES. 0 of num_key_value_heads: num_attention_heads; of head_dim:
            hidden_size / num_attention_heads.
        experts: what reads the sizes that a dense model has not.
        of_experts: the defaults of those that have one.
        tied: whether the head is tied where tie_word_embeddings is absent.
    """

    sizes: tuple[int, int, int, int, int, int, int]
    experts: Callable[[Config], dict[str, Any]] | None = None
    of_experts: Mapping[str, int] = {}
    tied: bool = False


SIZES = {  # of a config: their names in ModelSizes
    "vocab_size": "vocab",
    "hidden_size": "hidden",
    "intermediate_size": "intermediate",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
}
KINDS = {
    "cohere": Kind((256000, 8192, 22528, 40, 64, 0, 0), tied=True),
    "cohere2": Kind((256000, 8192, 22528, 40, 64, 0, 0), tied=True),
    "gemma": Kind((256000, 3072, 24576, 28, 16, 16, 256), tied=True),
    "gemma2": Kind((256000, 2304, 9216, 26, 8, 4, 256), tied=True),
    "gemma3_text": Kind((262208, 2304, 9216, 26, 8, 4, 256), tied=True),
    "granite": Kind((32000, 4096, 11008, 32, 32, 0, 0)),
    "llama": Kind((32000, 4096, 11008, 32, 32, 0, 0)),
    "ministral3": Kind((131072, 4096, 14336, 34, 32, 8, 128)),
    "mistral": Kind((32000, 4096, 14336, 32, 32, 8, 0)),
    "olmo": Kind((50304, 4096, 11008, 32, 32, 0, 0)),
    "olmo2": Kind((50304, 4096, 11008, 32, 32, 0, 0)),
    "olmo3": Kind((50304, 4096, 11008, 32, 32, 0, 0)),
    "qwen2": Kind((151936, 4096, 22016, 32, 32, 32, 0)),
    "qwen3": Kind((151936, 4096, 22016, 32, 32, 32, 128)),
    "seed_oss": Kind((155136, 4096, 27648, 64, 80, 8, 128)),
    "smollm3": Kind((128256, 2048, 11008, 36, 16, 4, 0), tied=True),
    # With experts:
    "dots1": Kind(
        (152064, 4608, 10944, 62, 32, 32, 0),
        read_glm4_moe,
        {"moe_intermediate_size": 1408, "first_k_dense_replace": 0},
    ),
    "glm4_moe": Kind(
        (151552, 4096, 10944, 46, 96, 8, 0),
        read_glm4_moe,
        {
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "llama4_text": Kind(
        (202048, 5120, 8192, 48, 40, 8, 128),
        read_llama4,
        {
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 16384,
            "interleave_moe_layer_step": 1,
        },
    ),
    "mixtral": Kind(
        (32000, 4096, 14336, 32, 32, 8, 0),
        read_mixtral,
        {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "olmoe": Kind(
        (50304, 2048, 2048, 16, 16, 0, 0),
        read_mixtral,
        {"num_experts": 64, "num_experts_per_tok": 8},
    ),
    "qwen2_moe": Kind(
        (151936, 2048, 5632, 24, 16, 16, 0),
        read_qwen2_moe,
        {
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "decoder_sparse_step": 1,
        },
    ),
    "qwen3_moe": Kind(
        (151936, 2048, 6144, 24, 32, 4, 0),
        read_qwen3_moe,
        {
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
        },
    ),
}


def read_config(where: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes that a config has, by their names in ModelSizes."""
    name, tied = fields.get("model_type"), fields.get(TIED)
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(
            f"{where}: expected model_type as one of {', '.join(KINDS)}, got {name!r}; pass sizes "
            f"instead if it has q, k, v, o and gated feed-forwards: --model {TEXT}"
        )
    if not isinstance(tied, bool | None):
        raise ValueError(f"{where}: expected {TIED} as true or false, got {tied!r}")
    defaults = {**dict(zip(SIZES, kind.sizes)), **kind.of_experts}
    # null is as good as absent, but for a size whose default it would replace.
    given = {name: v for name, v in fields.items() if v is not None or defaults.get(name)}
    config = Config(where, given, defaults)
    found = {own: config.size(name) for name, own in SIZES.items()}
    found["kv_heads"] = found["kv_heads"] or found["heads"]
    found["tied"] = int(kind.tied if tied is None else tied)
    return found | (kind.experts(config) if kind.experts else {})
