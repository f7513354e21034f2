"""One model on several processes: torchrun starts them, FSDP2 shards the model, rank 0 speaks.

    torchrun --nproc-per-node 4 -m minifloat train …

Every rank runs the whole job on its share of each batch's sequences. What a rank other than 0 would
write goes to a folder of its own that is thrown away, so that no line of the job asks who it is.
What the ranks must agree on, losses and stops, is reduced over them.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .config import SIZE
from .fields import TrainError, require

T = TypeVar("T")


def processes() -> int:
    """Returns how many processes torchrun started; 1 without it."""
    text = os.environ.get("WORLD_SIZE", "1")
    size = SIZE.parse(text)
    require("WORLD_SIZE", SIZE, text if size is None else size)
    return int(text)


@dataclass(frozen=True)
class World:
    """Where this process stands among those of the job."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"

    def shard(self, model: Any) -> nn.Module:
        """The model under FSDP2, block by block; alone: as it is."""
        if self.size > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(self.device, (self.size,))
            for block in model.layers:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model

    def share(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """This rank's sequences."""
        inputs, targets = (tokens.chunk(self.size)[self.rank] for tokens in batch)
        return inputs, targets

    def mean(self, value: Tensor) -> float:
        if self.size > 1:
            value = value.detach() / self.size
            dist.all_reduce(value)
        return value.item()

    def any(self, flag: bool) -> bool:
        return flag if self.size == 1 else self.mean(torch.tensor(float(flag)).to(self.device)) > 0

    def agree(self, decide: Callable[[], T]) -> T:
        """Calls `decide` on rank 0; every rank returns its result or raises its TrainError."""
        if self.size == 1:
            return decide()
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = decide()
            except (TrainError, OSError) as error:
                answer[1] = str(error)
        dist.broadcast_object_list(answer)
        if answer[1] is not None:
            raise TrainError(answer[1])
        return answer[0]

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


def whole(tensor: Any) -> Tensor:
    """A sharded tensor on every rank; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@contextmanager
def joined(device: str, batch: int) -> Iterator[World]:
    """The world that torchrun describes, its process group up; alone without torchrun."""
    size = processes()
    if size == 1:
        yield World(device=device)
        return
    if batch % size:
        raise TrainError(f"--batch: expected a multiple of the {size} processes, got {batch}")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise TrainError(
                f"{name}: expected torchrun's value beside WORLD_SIZE={size}, got none"
            )
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = dist.get_rank()
    try:
        yield World(rank, size, device)
    except RuntimeError as error:
        if not is_of_a_collective(error):
            raise
        raise TrainError(
            f"rank {rank} of {size}: {collective_of(error)} has failed, another rank has ended or "
            f"hangs ({' '.join(str(error).split())}); --resume goes on from the last checkpoint"
        ) from error
    finally:
        dist.destroy_process_group()


def is_of_a_collective(error: RuntimeError) -> bool:
    """Did the backend raise it? Gloo does so without a type of its own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def collective_of(error: RuntimeError) -> str:
    """The function of torch.distributed that was on its way, and our line that asked for it."""
    torchs, ours = Path(dist.__file__).parent, Path(__file__).parents[1]
    frames = traceback.extract_tb(error.__traceback__)

    def last(folder: Path) -> traceback.FrameSummary | None:
        return next((f for f in reversed(frames) if folder in Path(f.filename).parents), None)

    collective, caller = last(torchs), last(ours)
    name = collective.name if collective else "a collective"
    return f"{name} in `{caller.line}`" if caller else name


@contextmanager
def voice(world: World, out: Path) -> Iterator[Path]:
    """The folder that this rank writes to: `out`, or one to throw away, and nothing printed."""
    if world.rank == 0:
        yield out
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as silence,
        redirect_stdout(silence),
        redirect_stderr(silence),
    ):
        yield Path(folder) / out.name
