"""The sizes of a decoder that decide its speed, from a config.json of Hugging Face or from text.

A config is read by its model_type. KINDS has those whose layers are known; tests/clients compares
each with the model that transformers builds. Any other is refused, as its fields may mean other
layers.
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
        return checked(read_config(Config(str(path), config)), str(path))
    if TIED in config:
        text = {TIED: config[TIED], **text}
    where = f"{path}: text_config"
    return checked({**read_config(Config(where, text)), "section": "text_config"}, where)


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
        raise ValueError(f"{where}: expected {', '.join(missing)}, got {', '.join(found)}")
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
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # the first that is there


class Config(NamedTuple):
    """The fields of a config.   where: its name in an error."""

    where: str
    fields: Mapping[str, Any]

    def size(self, *names: str, least: int = 1, absent: int | None = None) -> int:
        """Returns an integer, of the first name that is there."""
        given = {name: self.fields[name] for name in names if self.fields.get(name) is not None}
        name, value = next(iter(given.items()), (" or ".join(names), absent))
        if not isinstance(value, int) or isinstance(value, bool) or (value < least and given):
            got = repr(value) if given else "none"
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
        "experts": config.size(*EXPERTS),
        "experts_per_token": config.size("num_experts_per_tok"),
        "expert_intermediate": config.size(width),
    }


def read_mixtral(config: Config) -> dict[str, Any]:
    return read_experts(config, "intermediate_size")


def read_qwen3_moe(config: Config) -> dict[str, Any]:
    every, dense = config.size("decoder_sparse_step", absent=1), config.blocks("mlp_only_layers")
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
        tied: whether the head is tied where tie_word_embeddings is absent.
        has_head_dim: whether the size of a head stands in the config alone; else it is
            hidden_size / num_attention_heads where head_dim is absent.
        experts: what reads the sizes that a dense model has not.
    """

    tied: bool = False
    has_head_dim: bool = False
    experts: Callable[[Config], dict[str, Any]] | None = None


KINDS = {
    "cohere": Kind(tied=True),
    "cohere2": Kind(tied=True, has_head_dim=True),
    "gemma": Kind(tied=True, has_head_dim=True),
    "gemma2": Kind(tied=True, has_head_dim=True),
    "gemma3_text": Kind(tied=True, has_head_dim=True),
    "granite": Kind(),
    "llama": Kind(),
    "ministral3": Kind(has_head_dim=True),
    "mistral": Kind(),
    "olmo": Kind(),
    "olmo2": Kind(),
    "olmo3": Kind(),
    "qwen2": Kind(),
    "qwen3": Kind(has_head_dim=True),
    "seed_oss": Kind(has_head_dim=True),
    "smollm3": Kind(tied=True),
    # With experts:
    "dots1": Kind(experts=read_glm4_moe),
    "glm4_moe": Kind(experts=read_glm4_moe),
    "llama4_text": Kind(has_head_dim=True, experts=read_llama4),
    "mixtral": Kind(experts=read_mixtral),
    "olmoe": Kind(experts=read_mixtral),
    "qwen2_moe": Kind(experts=read_qwen2_moe),
    "qwen3_moe": Kind(experts=read_qwen3_moe),
}


def read_config(config: Config) -> dict[str, Any]:
    """Returns the sizes that a config has, by their names in ModelSizes."""
    name, tied = config.fields.get("model_type"), config.fields.get(TIED)
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(
            f"{config.where}: expected model_type as one of {', '.join(KINDS)}, got {name!r}; pass "
            f"sizes instead if it has q, k, v, o and gated feed-forwards: --model {TEXT}"
        )
    if not isinstance(tied, bool | None):
        raise ValueError(f"{config.where}: expected {TIED} as true or false, got {tied!r}")
    found = {
        "hidden": config.size("hidden_size"),
        "intermediate": config.size("intermediate_size"),
        "layers": config.size("num_hidden_layers"),
        "heads": config.size("num_attention_heads"),
        "kv_heads": config.size("num_key_value_heads"),
        "head_dim": config.size("head_dim", absent=None if kind.has_head_dim else 0),
        "vocab": config.size("vocab_size"),
        "tied": int(kind.tied if tied is None else tied),
    }
    return found | (kind.experts(config) if kind.experts else {})
