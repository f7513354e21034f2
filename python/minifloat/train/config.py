"""What a training job is asked to do, as frozen dataclasses that survive a trip through JSON.

`ModelConfig` and `TrainConfig` hold everything that decides the bytes of the result, and nothing
else: where to write and whether to resume are the caller's. A resumed job compares them field by
field (`differences`) and refuses to go on when one differs, save those that it is `FREE` to change.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

# The tokens themselves are compared; and a step's batch is the same on any number of processes.
FREE = ("data", "data_mb", "processes")


class TrainError(Exception):
    """An expected failure of the job: the message is for the user, no traceback needed."""


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
            if value < 1:
                raise TrainError(f"model: expected {name} >= 1, got {value}")
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise TrainError(
                "model: expected dim to be heads times an even width, "
                f"got {self.dim} / {self.heads}"
            )
        if self.heads % self.kv_heads:
            raise TrainError(
                "model: expected heads to be a multiple of kv_heads, "
                f"got {self.heads} and {self.kv_heads}"
            )

    @classmethod
    def parse(cls, text: str, vocab: int) -> ModelConfig:
        """From `dim,layers,heads,kv_heads,ffn`, for example 256,4,4,2,768."""
        parts = text.replace(" ", "").split(",")
        if len(parts) != 5 or not all(part.isdigit() for part in parts):
            raise TrainError(
                "--model: expected five integers dim,layers,heads,kv_heads,ffn "
                f"(256,4,4,2,768), got {text!r}"
            )
        dim, layers, heads, kv_heads, ffn = map(int, parts)
        return cls(dim, layers, heads, kv_heads, ffn, vocab)

    def __str__(self) -> str:
        return f"{self.dim},{self.layers},{self.heads},{self.kv_heads},{self.ffn}"


@dataclass(frozen=True)
class TrainConfig:
    """One job: the same model, data and schedule for every recipe.

    seq: tokens a sequence; batch: sequences a step; lr: the peak; clip: the gradient's norm;
    data_mb: at most so many megabytes (1e6 bytes) of text; threads: of the CPU (0 on a GPU);
    processes: that share a step's batch.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: tuple[str, ...] = ()  # files and folders; empty: Python's standard library
    data_mb: float = 30.0
    steps: int = 300
    seq: int = 256
    batch: int = 12
    lr: float = 1.5e-3
    warmup: int = 30
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 1
    eval_every: int = 25
    eval_batches: int = 16
    checkpoint_every: int = 50
    threads: int = 0
    device: str = "cpu"
    processes: int = 1

    def __post_init__(self) -> None:
        at_least_one = ("steps", "seq", "batch", "eval_every", "eval_batches", "checkpoint_every")
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise TrainError(
                    f"--{name.replace('_', '-')}: expected at least 1, got {getattr(self, name)}"
                )
        for name in ("lr", "clip", "data_mb"):
            if not getattr(self, name) > 0:
                raise TrainError(
                    f"--{name.replace('_', '-')}: expected more than 0, got {getattr(self, name)}"
                )

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def identity(self) -> dict[str, Any]:
        """What a job must have in common with the one that it goes on from."""
        return bound(self.to_json())

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainConfig:
        known = {f.name for f in dataclasses.fields(cls)}
        kept = {key: value for key, value in values.items() if key in known}
        kept["model"] = ModelConfig(**kept["model"])
        kept["data"] = tuple(kept["data"])
        return cls(**kept)


def bound(values: dict[str, Any]) -> dict[str, Any]:
    """A job's fields without those that it is free to change."""
    return {key: value for key, value in values.items() if key not in FREE}


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one: {"model": {"dim": 256}} becomes {"model.dim": 256}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat


def differences(saved: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """One line a field that differs: `model.dim: 256 there, 128 asked for`."""
    there, here = flatten(saved), flatten(asked)
    return [
        f"{key}: {there.get(key, 'nothing')!r} there, {here.get(key, 'nothing')!r} asked for"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    ]
