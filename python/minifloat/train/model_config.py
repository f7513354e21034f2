"""Sizes of the models that `minifloat train` trains, and their texts on the command line."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from .fields import TrainError, integers, require, shown

SIZE = integers(1, 10**6)  # of one dimension of the model


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the Llama: dim, layers, heads, kv_heads, ffn, and the vocabulary."""

    dim: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 768
    vocab: int = 2048

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            require("--vocab" if name == "vocab" else f"--model: {name}", SIZE, value)
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
        numbers = [SIZE.parse(number.strip(" ")) for number in text.split(",")]
        sizes = [int(number) for number in numbers if number is not None]
        if len(numbers) != 5 or len(sizes) != 5:
            raise TrainError(
                "--model: expected five integers dim,layers,heads,kv_heads,ffn "
                f"(256,4,4,2,768), got {shown(text)}"
            )
        dim, layers, heads, kv_heads, ffn = sizes
        return cls(dim, layers, heads, kv_heads, ffn, vocab)

    @property
    def parameters(self) -> int:
        """The number of the model's parameters."""
        kv_dim = self.dim // self.heads * self.kv_heads
        layer = 2 * self.dim * (self.dim + kv_dim) + 3 * self.dim * self.ffn + 2 * self.dim
        return 2 * self.vocab * self.dim + self.layers * layer + self.dim

    def __str__(self) -> str:
        return f"{self.dim},{self.layers},{self.heads},{self.kv_heads},{self.ffn}"
