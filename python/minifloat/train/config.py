"""Settings of a training job, as frozen dataclasses that are saved as JSON and loaded again.

`ModelConfig` and `TrainConfig` hold everything that decides the bytes of the result, and nothing
else: the caller chooses the folder and whether to resume. A resumed job compares the fields
(`differences`) and stops where one differs, except those in `FREE`, which may change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .fields import (
    OBJECT,
    SEED,
    TEXTS,
    Fields,
    Kind,
    Number,
    TrainError,
    integers,
    numbers,
    require,
    require_fields,
)
from .model_config import SIZE, MixtureConfig, ModelConfig, saved_model

MOST = 10**9  # the limit of counts
MOST_THREADS = 4096  # many more end the process in torch

# Fields that may change: the token ids are compared themselves, a step's batch does not depend on
# the number of processes or on compiled code, and a capacity, which may drop rows, belongs to the
# processes.
FREE = ("data", "data_mb", "processes", "expert_parallel", "expert_capacity", "compile")
ALL_ROWS = "all"

# The numbers of TrainConfig: the range, on the command line and in job.json, and the help text.
NUMBERS: Mapping[str, tuple[Number, str]] = {
    "steps": (integers(1, MOST), "optimizer steps a recipe"),
    "seq": (integers(1, MOST), "tokens a sequence"),
    "batch": (integers(1, MOST), "sequences a step"),
    "lr": (numbers(0, MOST, above=True), "peak learning rate"),
    "warmup": (integers(0, MOST), "steps of linear warmup"),
    "weight_decay": (numbers(0, MOST), "AdamW's decay of matrices"),
    "clip": (numbers(0, 1e30, above=True), "largest norm of the gradient"),
    "seed": (SEED, "of the initial weights and the batches"),
    "eval_every": (integers(1, MOST), "steps between evaluations"),
    "eval_batches": (integers(1, MOST), "batches of validation text"),
    "checkpoint_every": (integers(1, MOST), "steps between checkpoints"),
    "data_mb": (numbers(0, MOST, above=True), "most megabytes of text to read"),
    "threads": (integers(0, MOST_THREADS), "CPU threads; part of the result's bytes"),
    "expert_parallel": (SIZE, "processes that divide a mixture's experts, which rows travel to"),
}


ROWS = integers(1, MOST)
CAPACITY = Kind(
    f"a number of rows from 1 to {MOST}, {ALL_ROWS!r} or none",
    lambda value: value is None or value == ALL_ROWS or not ROWS.refusal(value),
)

BOOL = Kind("true or false", lambda value: isinstance(value, bool))


def option_of(name: str) -> str:
    """Returns a field's option on the command line: eval_every is --eval-every."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a job: one model, data and schedule for every recipe.

    seq: tokens a sequence; batch: sequences a step; lr: the peak; clip: the gradient's norm;
    data_mb: the most megabytes (1e6 bytes) of text; threads: of the CPU (0 on a GPU);
    processes: the number that shares a step's batch; expert_parallel: how many of them divide the
    experts, 1: none; expert_capacity: most rows from one of those to another in a layer, "all": as
    many as there can be, None: exact sizes; compile: whether torch.compile compiles the layers.
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
    expert_parallel: int = 1
    expert_capacity: int | str | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        for name, (number, _) in NUMBERS.items():
            require(option_of(name), number, getattr(self, name))
        require("processes", SIZE, self.processes)
        require("--expert-capacity", CAPACITY, self.expert_capacity)
        require("--compile", BOOL, self.compile)
        if self.expert_parallel > 1:
            require_divisible(self.model, self.processes, self.expert_parallel)
        elif self.expert_capacity is not None:
            raise TrainError(
                f"--expert-capacity {self.expert_capacity}: expected --expert-parallel of at least "
                "2, whose processes send rows to each other, got 1"
            )

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def identity(self) -> dict[str, Any]:
        """Returns the fields that a resumed job must have in common with the saved one."""
        return bound(self.to_json())

    @classmethod
    def from_json(cls, where: str, values: Any) -> TrainConfig:
        """Returns the config of `to_json`'s values.

        Raises:
            TrainError: a value is missing or not as expected; the message starts with `where`.
        """
        require_fields(where, SAVED_CONFIG, values)
        chosen = {name: values[name] for name in SAVED_CONFIG}
        try:
            chosen["model"] = saved_model(values["model"])
            return cls(**{**chosen, "data": tuple(values["data"])})
        except TrainError as error:
            raise TrainError(f"{where}: {error}") from error


def require_divisible(model: ModelConfig, processes: int, expert_parallel: int) -> None:
    """Refuses experts that the processes cannot divide."""
    option = "--expert-parallel"
    if not isinstance(model, MixtureConfig):
        raise TrainError(f"{option}: expected 1 for a model without experts, got {expert_parallel}")
    if processes % expert_parallel:
        raise TrainError(
            f"{option}: expected a divisor of the job's processes, got {expert_parallel} of "
            f"{processes}"
        )
    if model.experts % expert_parallel:
        raise TrainError(
            f"{option}: expected a divisor of the {model.experts} experts, got {expert_parallel}"
        )
    groups, own = processes // expert_parallel, model.experts // expert_parallel
    if own % groups and model.dim % groups:
        raise TrainError(
            f"{option} {expert_parallel}: expected the {processes // expert_parallel} groups of "
            f"processes to divide the {own} experts of a process, or the width {model.dim}, for "
            "FSDP2"
        )


SAVED_CONFIG: Fields = {
    "model": OBJECT,
    "data": TEXTS,
    "device": Kind("'cpu' or 'cuda'", lambda value: value in ("cpu", "cuda")),
    "processes": SIZE,
    "expert_capacity": CAPACITY,
    "compile": BOOL,
    **{name: number for name, (number, _) in NUMBERS.items()},
}


def bound(values: dict[str, Any]) -> dict[str, Any]:
    """Returns a job's fields, except those that may change."""
    return {key: value for key, value in values.items() if key not in FREE}


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested dicts: {"model": {"dim": 256}} becomes {"model.dim": 256}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat


def differences(saved: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """Lists the fields that differ, a line each: `model.dim: 256 there, 128 asked for`."""
    there, here = flatten(saved), flatten(asked)
    return [
        f"{key}: {there.get(key, 'nothing')!r} there, {here.get(key, 'nothing')!r} asked for"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    ]
