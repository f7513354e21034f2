"""Sizes of the models that `minifloat train` trains, and their texts on the command line.

dim,layers,heads,kv_heads,ffn                                   a Llama
moe:dim,layers,heads,kv_heads,hidden,experts,top_k,shared       with mixtures of experts
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..moe.router import MOST_EXPERTS
from .fields import COUNT, Fields, Number, TrainError, integers, require, require_fields, shown

MOST_SIZE = 10**6
SIZE = integers(1, MOST_SIZE)  # of one dimension of the model
MIXTURE = "moe:"  # begins the text of a model with experts


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the Llama: dim, layers, heads, kv_heads, ffn, and the vocabulary."""

    dim: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 768
    vocab: int = 2048

    ranges: ClassVar[Mapping[str, Number]] = {}  # of sizes with other bounds than SIZE

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            where = "--vocab" if name == "vocab" else f"--model: {name}"
            require(where, self.ranges.get(name, SIZE), value)
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise TrainError(
                "--model: expected dim to be heads times an even width, "
                f"got {self.dim} / {self.heads}"
            )
        if self.heads % self.kv_heads:
            raise TrainError(
                "--model: expected heads to be a multiple of kv_heads, "
                f"got {self.heads} and {self.kv_heads}"
            )

    @classmethod
    def parse(cls, text: str, vocab: int) -> ModelConfig:
        """Parses `dim,layers,heads,kv_heads,ffn`, for example 256,4,4,2,768."""
        names = ("dim", "layers", "heads", "kv_heads", "ffn")
        return cls(vocab=vocab, **parse_sizes(text, "", names, "five", "256,4,4,2,768"))

    @property
    def mixtures(self) -> int:
        """The number of layers with experts."""
        return 0

    @property
    def parameters(self) -> int:
        """The number of the model's parameters."""
        kv_dim = self.dim // self.heads * self.kv_heads
        layer = 2 * self.dim * (self.dim + kv_dim) + 2 * self.dim
        feed_forward = 3 * self.dim * self.ffn * (self.layers - self.mixtures)
        return 2 * self.vocab * self.dim + self.layers * layer + feed_forward + self.dim

    @property
    def active_parameters(self) -> int:
        """The number of parameters that one token is multiplied with, embedding included."""
        return self.parameters

    @property
    def description(self) -> str:
        """The sizes as the report writes them."""
        return (
            f"Llama, dim {self.dim}, {self.layers} layers, {self.heads} heads, {self.kv_heads} "
            f"key/value heads, hidden width {self.ffn}, vocabulary {self.vocab}"
        )

    def __str__(self) -> str:
        return f"{self.dim},{self.layers},{self.heads},{self.kv_heads},{self.ffn}"


@dataclass(frozen=True)
class MixtureConfig(ModelConfig):
    """Sizes of a Llama whose first feed-forward is dense and whose others are mixtures of experts.

    hidden: width of one expert's hidden layer; top_k: experts of a token; shared: experts' widths
    of the SwiGLU that every token goes through; ffn: hidden width of the first layer. `parse` sets
    it to hidden * (top_k + shared), the width that a token goes through in the other layers.
    """

    hidden: int = 256
    experts: int = 16
    top_k: int = 2
    shared: int = 1

    ranges: ClassVar[Mapping[str, Number]] = {
        "experts": integers(1, MOST_EXPERTS),
        "shared": integers(0, MOST_SIZE),
        "ffn": integers(1, MOST_SIZE**2),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers < 2:
            raise TrainError(
                "--model: expected at least 2 layers, of which the first is dense, "
                f"got {self.layers}"
            )
        if self.top_k > self.experts:
            raise TrainError(
                f"--model: expected top_k of at most {self.experts} experts, got {self.top_k}"
            )

    @classmethod
    def parse(cls, text: str, vocab: int) -> MixtureConfig:
        """Parses the sizes after `moe:`, for example 512,4,8,4,256,16,2,1."""
        names = ("dim", "layers", "heads", "kv_heads", "hidden", "experts", "top_k", "shared")
        sizes = parse_sizes(text, MIXTURE, names, "eight", "moe:512,4,8,4,256,16,2,1")
        ffn = sizes["hidden"] * (sizes["top_k"] + sizes["shared"])
        return cls(ffn=max(ffn, 1), vocab=vocab, **sizes)  # errors name the sizes of the text

    @property
    def mixtures(self) -> int:
        return self.layers - 1

    @property
    def parameters(self) -> int:
        expert = 3 * self.dim * self.hidden
        mixture = self.experts * self.dim + (self.experts + self.shared) * expert
        return super().parameters + self.mixtures * mixture

    @property
    def active_parameters(self) -> int:
        idle = (self.experts - self.top_k) * 3 * self.dim * self.hidden
        return self.parameters - self.mixtures * idle

    @property
    def description(self) -> str:
        return (
            f"mixture of experts, dim {self.dim}, {self.layers} layers, {self.heads} heads, "
            f"{self.kv_heads} key/value heads, vocabulary {self.vocab}; the first layer dense with "
            f"hidden width {self.ffn}, the others with {self.experts} experts of hidden width "
            f"{self.hidden}, {self.top_k} a token and {self.shared} shared; "
            f"{self.parameters / 1e6:.1f}M parameters, {self.active_parameters / 1e6:.1f}M of them "
            "active for a token"
        )

    def __str__(self) -> str:
        sizes = (self.dim, self.layers, self.heads, self.kv_heads, self.hidden, self.experts)
        return MIXTURE + ",".join(map(str, (*sizes, self.top_k, self.shared)))


def parse_sizes(
    text: str, prefix: str, names: tuple[str, ...], count: str, example: str
) -> dict[str, int]:
    """Parses integers after a prefix, separated by commas; returns them by name."""
    numbers = [SIZE.parse(number.strip(" ")) for number in text.removeprefix(prefix).split(",")]
    sizes = [int(number) for number in numbers if number is not None]
    if len(numbers) != len(names) or len(sizes) != len(names):
        raise TrainError(
            f"--model: expected {count} integers {prefix}{','.join(names)} ({example}), "
            f"got {shown(text)}"
        )
    return dict(zip(names, sizes))


def parse_model(text: str, vocab: int) -> ModelConfig:
    """Parses the text of a model of either kind."""
    kind = MixtureConfig if text.startswith(MIXTURE) else ModelConfig
    return kind.parse(text, vocab)


def saved_model(values: Any) -> ModelConfig:
    """Returns the model that job.json describes.

    Raises:
        TrainError: a value is missing or not as expected.
    """
    kind = MixtureConfig if isinstance(values, dict) and "experts" in values else ModelConfig
    names = [f.name for f in dataclasses.fields(kind)]
    fields: Fields = dict.fromkeys(names, COUNT)
    require_fields("model", fields, values)
    return kind(**{name: values[name] for name in names})
