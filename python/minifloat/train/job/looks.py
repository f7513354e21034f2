"""What the inspector sees of a run: every `--inspect-every` steps, and at a step that diverges.

OUT/metrics.jsonl, tensorboard/RUN/    a record of kind "inspect": numbers by metric and layer
OUT/runs/RUN/inspect/                  the tables and the JSON of the latest look, its heat map

A look runs the model a second time, on the first sequences of the step's batch, before the step. So
weights and batch are those of the step, and no byte of the training differs. On several processes
each runs it on its own sequences, and rank 0's numbers are kept.
"""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from ...inspector.inspect import inspect
from ...inspector.inspection import Inspection
from ...inspector.nonfinite import NotFinite, find_nonfinite
from ..durable_files import write_atomically, write_text
from .processes import World

TOKENS = 512  # of a look, at most, but at least one sequence
OPERAND = ("snr_db", "saturated", "flushed", "zero_scales", "outlier_channels", "nonfinite")
LAYER = ("y_error", "dx_error", "dw_error", "loss_first", "loss_second")

Batch = tuple[Tensor, Tensor]


class Looks:
    """The inspector of one run.

    Args:
        model: as the run trains it.
        forward: (inputs, targets) -> loss.
        world: the processes of the job.
        folder: of the run.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[Tensor, Tensor], Tensor],
        world: World,
        folder: Path,
    ) -> None:
        self.model, self.forward, self.world = model, forward, world
        self.folder = folder / "inspect"
        self.latest: Inspection | None = None

    def loss(self, _: nn.Module, batch: Batch) -> Tensor:
        return self.forward(*batch)

    def look(self, batch: Batch) -> dict[str, float]:
        """Inspects the layers under their own recipes; returns the numbers by name.

        batch: this process's sequences of the step.
        """
        start = time.perf_counter()
        sequences = max(TOKENS // batch[0].shape[1], 1)
        inputs, targets = (t[:sequences] for t in batch)
        self.latest = inspect(self.model, (inputs, targets), loss=self.loss)
        values = dict(numbers_of(self.latest))
        write(self.latest, self.folder)
        return values | {"seconds": time.perf_counter() - start}

    def explain(self, batch: Batch) -> str:
        """Names the first values of a step that are not finite, on any process, in one line."""
        found = find_nonfinite(self.model, batch, self.loss)
        every: list[NotFinite | None] = [found]
        if self.world.size > 1:
            every = [None] * self.world.size
            dist.all_gather_object(every, found)
        ranked = sorted((f.place, rank) for rank, f in enumerate(every) if f is not None)
        if not ranked:
            return "all values of its batch are finite when it is repeated uncompiled"
        rank = ranked[0][1]
        return f"first in {every[rank]}" + (f" (rank {rank})" if self.world.size > 1 else "")

    def close(self) -> None:
        """Draws the heat map of the latest look."""
        if self.latest is not None:
            write_atomically(self.folder / "inspect.png", self.latest.plot)


def numbers_of(found: Inspection) -> Iterator[tuple[str, float]]:
    """Yields metric/operand/layer and its number, for FP4 and FP8 layers alike."""
    for row in found.rows:
        for name in LAYER:
            yield f"{name}/{row.layer}", float(getattr(row, name))
        for each in row.operands:
            operand = each.operand.replace("/", ".")
            for name in OPERAND:
                yield f"{name}/{operand}/{row.layer}", float(getattr(each, name))


def write(found: Inspection, folder: Path) -> None:
    """Writes the tables and the JSON of an inspection."""
    folder.mkdir(parents=True, exist_ok=True)
    text = f"# Layers\n\n{found.table()}\n\n# Operands\n\n{found.operand_table()}\n"
    write_text(folder / "inspect.md", text)
    write_text(folder / "inspect.json", found.json())


def is_finite(values: dict[str, float]) -> bool:
    """Tells whether loss and gradient norm of a step are finite."""
    return math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
