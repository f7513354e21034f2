"""Sizes of the models that `minifloat train` trains, and their texts on the command line.

dim,layers,heads,kv_heads,ffn                                   a Llama
moe:dim,layers,heads,kv_heads,hidden,experts,top_k,shared       with mixtures of experts
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...moe.router import MOST_EXPERTS
from ..checks import Json, Number, Settings, TrainError, setting, shown

MOST_SIZE = 10**6
SIZE = Number(int, 1, MOST_SIZE)  # of one dimension of the model


@dataclass(frozen=True)
class ModelConfig(Settings):
    """Sizes of the Llama: dim, layers, heads, kv_heads, ffn, and the vocabulary."""

    dim: int = setting(256, SIZE)
    layers: int = setting(4, SIZE)
    heads: int = setting(4, SIZE)
    kv_heads: int = setting(2, SIZE)
    ffn: int = setting(768, SIZE)
    vocab: int = setting(2048, SIZE)

    prefix: ClassVar[str] = ""  # of the text
    names: ClassVar[tuple[str, ...]] = ("dim", "layers", "heads", "kv_heads", "ffn")  # in the text
    expected: ClassVar[str] = "five integers dim,layers,heads,kv_heads,ffn (256,4,4,2,768)"

    def __post_init__(self) -> None:
        super().__post_init__()
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

    @staticmethod
    def where(name: str) -> str:
        return "--vocab" if name == "vocab" else f"--model: {name}"

    @property
    def mixtures(self) -> int:
        """The number of layers with experts."""
        return 0

    @property
    def converted_layers(self) -> str:
        """What a recipe converts in the model, for messages."""
        return "linear layers and weights of experts" if self.mixtures else "linear layers"

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
        return self.prefix + ",".join(str(getattr(self, name)) for name in self.names)


@dataclass(frozen=True)
class MixtureConfig(ModelConfig):
    """Sizes of a Llama whose first feed-forward is dense and whose others are mixtures of experts.

    hidden: width of one expert's hidden layer; top_k: experts of a token; shared: experts' widths
    of the SwiGLU that every token goes through; ffn: hidden width of the first layer. `parse_model`
    sets it to hidden * (top_k + shared), the width that a token goes through in the other layers.
    """

    ffn: int = setting(768, Number(int, 1, MOST_SIZE**2))
    hidden: int = setting(256, SIZE)
    experts: int = setting(16, Number(int, 1, MOST_EXPERTS))
    top_k: int = setting(2, SIZE)
    shared: int = setting(1, Number(int, 0, MOST_SIZE))

    prefix: ClassVar[str] = "moe:"
    names: ClassVar[tuple[str, ...]] = (
        *("dim", "layers", "heads", "kv_heads"),
        *("hidden", "experts", "top_k", "shared"),
    )
    expected: ClassVar[str] = (
        "eight integers moe:dim,layers,heads,kv_heads,hidden,experts,top_k,shared "
        "(moe:512,4,8,4,256,16,2,1)"
    )

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


def parse_model(text: str, vocab: int) -> ModelConfig:
    """Parses the text of a model of either kind."""
    kind = MixtureConfig if text.startswith(MixtureConfig.prefix) else ModelConfig
    numbers = [SIZE.read(size.strip(" ")) for size in text.removeprefix(kind.prefix).split(",")]
    sizes = {name: size for name, size in zip(kind.names, numbers) if isinstance(size, int)}
    if len(numbers) != len(kind.names) or len(sizes) != len(kind.names):
        raise TrainError(f"--model: expected {kind.expected}, got {shown(text)}")
    if kind is MixtureConfig:  # at least 1, so that errors name the sizes of the text
        sizes["ffn"] = max(sizes["hidden"] * (sizes["top_k"] + sizes["shared"]), 1)
    return kind(vocab=vocab, **sizes)


def saved_model(where: str, values: Json) -> ModelConfig:
    """Returns the model that job.json describes; TrainError where a value is not as expected."""
    kind = MixtureConfig if "experts" in values else ModelConfig
    return kind.from_json(where, values)
