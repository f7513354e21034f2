"""The sizes of a decoder that decide its speed, from a config.json of Hugging Face or from text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Names of a field in configs of Hugging Face, and the short one of a text; the first that is there.
NAMES = {
    "hidden": ("hidden_size", "hidden"),
    "intermediate": ("intermediate_size", "intermediate"),
    "layers": ("num_hidden_layers", "layers"),
    "heads": ("num_attention_heads", "heads"),
    "kv_heads": ("num_key_value_heads", "kv_heads"),
    "head_dim": ("head_dim",),
    "vocab": ("vocab_size", "vocab"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token"),
    "expert_intermediate": ("moe_intermediate_size", "expert_intermediate"),
    "shared_intermediate": ("shared_expert_intermediate_size", "shared_intermediate"),
}
TEXT = ", ".join(f"{names[-1]}=N" for names in NAMES.values())
ALWAYS = ("hidden", "intermediate", "layers", "heads", "vocab")
# Fields of attention with low-rank projections, which have other products than q, k, v and o.
OTHER_ATTENTION = ("kv_lora_rank", "q_lora_rank")


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

    def parts(self) -> list[Part]:
        """Returns the linear layers, those of one input together."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found = [
            Part("q, k, v", self.hidden, (q, kv, kv), self.layers),
            Part("o", q, (self.hidden,), self.layers),
        ]
        sparse = self.layers - self.dense_layers if self.experts else 0
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
    def other_weights(self) -> int:
        """The elements of the embedding."""
        return self.vocab * self.hidden

    def gated_widths(self) -> int:
        """Returns the hidden widths that a token passes in all feed-forwards."""
        sparse = self.layers - self.dense_layers if self.experts else 0
        of_sparse = self.experts_per_token * self.expert_intermediate + self.shared_intermediate
        return (self.layers - sparse) * self.intermediate + sparse * of_sparse


def read_sizes(model: str) -> ModelSizes:
    """Reads the sizes of a model.

    Args:
        model: the path of a config.json, of a folder with one, or text such as
            "hidden=4096,intermediate=14336,layers=32,heads=32,kv_heads=8,vocab=128256".

    Raises:
        OSError: a file cannot be read.
        ValueError: a size is missing or no positive integer, or the model is of another kind.
    """
    if "=" in model and "/" not in model:
        return sizes_of(parse_text(model), "--model")
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
    return sizes_of(text if isinstance(text, dict) else config, str(path))


def parse_text(text: str) -> dict[str, Any]:
    config: dict[str, Any] = {}
    known = {name for names in NAMES.values() for name in names}
    for pair in re.findall("[^,]+", text):
        name, _, value = (word.strip() for word in pair.partition("="))
        if name not in known or not value.isdecimal():
            raise ValueError(f"--model: expected sizes as {TEXT}; got {pair.strip()!r}")
        config[name] = int(value)
    return config


def sizes_of(config: Mapping[str, Any], where: str) -> ModelSizes:
    """Returns the sizes in a config's fields.   where: its name in an error."""
    for name in OTHER_ATTENTION:
        if config.get(name):
            raise ValueError(
                f"{where}: expected attention with projections q, k, v and o, got {name}: no "
                "prediction for low-rank projections"
            )
    found: dict[str, int] = {}
    for size, names in NAMES.items():
        given = [name for name in names if config.get(name) is not None]
        if not given:
            continue
        name, value = given[0], config[given[0]]
        least = 0 if size not in ALWAYS else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{where}: expected {name} as a positive integer, got {value!r}")
        found[size] = value
    missing = [NAMES[size][0] for size in ALWAYS if size not in found]
    if missing:
        raise ValueError(f"{where}: expected {', '.join(missing)}, got {', '.join(config)}")
    found.setdefault("kv_heads", found["heads"])
    if found["heads"] % max(found["kv_heads"], 1) or not found["kv_heads"]:
        raise ValueError(
            f"{where}: expected heads as a multiple of kv_heads, got {found['heads']} and "
            f"{found['kv_heads']}"
        )
    found["head_dim"] = found.get("head_dim") or found["hidden"] // found["heads"]
    if not found["head_dim"]:
        sizes = f"hidden {found['hidden']} and heads {found['heads']}"
        raise ValueError(f"{where}: expected no more heads than the hidden size, got {sizes}")
    if found.get("experts"):
        chosen, count = found.get("experts_per_token", 0), found["experts"]
        if not 1 <= chosen <= count:
            raise ValueError(f"{where}: expected num_experts_per_tok in 1..{count}, got {chosen}")
        found["expert_intermediate"] = found.get("expert_intermediate") or found["intermediate"]
        try:
            found["dense_layers"] = count_dense(config, found["layers"])
        except TypeError as error:
            fields = "decoder_sparse_step, mlp_only_layers and first_k_dense_replace"
            raise ValueError(f"{where}: expected {fields} as in Qwen's, got {error}") from None
    return ModelSizes(**found)


def count_dense(config: Mapping[str, Any], layers: int) -> int:
    """Counts the blocks of a model with experts that have a feed-forward, as Qwen's configs say."""
    every, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    first = config.get("first_k_dense_replace") or 0
    return sum(i in dense or i < first or (i + 1) % every > 0 for i in range(layers))
