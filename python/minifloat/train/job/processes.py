"""One model on several processes: torchrun starts them, FSDP2 shards the model, rank 0 prints.

    torchrun --nproc-per-node 4 -m minifloat train …

Every rank runs the whole job on its share of each batch's sequences. Ranks other than 0 write to a
temporary folder, so the code of the job does not depend on the rank. Losses and stops are reduced
over the ranks. What is cut over which ranks:

ranks     groups of `--expert-parallel` ranks divide the experts, and rows travel within a group
groups    FSDP2 cuts a rank's experts over the groups, where there are several: between experts,
          or along another dimension where the groups do not divide their number
others    FSDP2 cuts all other weights over all ranks
"""

import logging
import os
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from ...distributed.ending import destroy_process_group
from ...moe.layer import divided_experts
from ...moe.ranks.expert_parallel import expert_parallel
from ..checks import TrainError, require
from ..config import SIZE


def processes() -> int:
    """Returns how many processes torchrun started; 1 without it."""
    size = SIZE.read(os.environ.get("WORLD_SIZE", "1"))
    require("WORLD_SIZE", SIZE, size)
    return int(size)


@dataclass(frozen=True)
class World:
    """The rank and device of this process, and the number of the job's processes."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"

    def shard(
        self, model: nn.Module, expert_parallel: int = 1, capacity: int | str | None = None
    ) -> nn.Module:
        """Shards the model with FSDP2, block by block; one process leaves it unchanged.

        Args:
            expert_parallel: ranks of each group that divides the experts first; 1: FSDP2 cuts them
                as all other weights.
            capacity: as that of mf.expert_parallel.
        """
        if self.size > 1:
            mesh = init_device_mesh(self.device, (self.size,))
            ignored = None
            if expert_parallel > 1:
                ignored = self.divide_experts(model, expert_parallel, capacity)
            for block in cast(nn.ModuleList, model.layers):
                fully_shard(block, mesh=mesh, ignored_params=ignored)
            fully_shard(model, mesh=mesh, ignored_params=ignored)
        return model

    def divide_experts(
        self, model: nn.Module, ranks: int, capacity: int | str | None
    ) -> set[nn.Parameter]:
        """Divides the experts over `ranks` ranks, and over the groups of so many with FSDP2.

        torch 2.11 sets no state of a dimension that two meshes cut unevenly. So FSDP2 cuts a
        parameter along the first dimension that the groups divide. Cut along 0, weights are
        gathered as codes.

        Returns:
            The parameters that FSDP2 is to leave alone: with one group, those of the experts, which
            would else be copied in each forward.
        """
        groups = self.size // ranks
        mesh = init_device_mesh(self.device, (groups, ranks), mesh_dim_names=("group", "rank"))
        expert_parallel(model, mesh["rank"], capacity=capacity)
        if groups == 1:
            return {p for module in divided_experts(model) for p in module.parameters()}

        def placement(parameter: nn.Parameter) -> Shard:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            return Shard(next(dim for dim, n in enumerate(local.shape) if n % groups == 0))

        for module in divided_experts(model):
            fully_shard(module, mesh=mesh["group"], shard_placement_fn=placement)
        return set()

    def share(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns this rank's sequences of a batch, on its device."""
        inputs, targets = (t.chunk(self.size)[self.rank].to(self.device) for t in batch)
        return inputs, targets

    def mean(self, value: Tensor) -> float:
        """Returns the mean over the ranks."""
        value = value.detach() / self.size
        if self.size > 1:
            dist.all_reduce(value)
        return value.item()

    def total(self, count: int) -> int:
        """Returns the sum over the ranks."""
        value = torch.tensor(count, device=self.device)
        if self.size > 1:
            dist.all_reduce(value)
        return int(value.item())

    def agree(self, decide: Callable[[], Any]) -> Any:
        """Calls `decide` on rank 0; every rank returns its result or raises its TrainError."""
        if self.size == 1:
            return decide()
        answer: list[Any] = [None]
        if self.rank == 0:
            try:
                answer[0] = decide()
            except (TrainError, OSError) as error:
                answer[0] = TrainError(str(error))
        dist.broadcast_object_list(answer)
        if isinstance(answer[0], TrainError):
            raise answer[0]
        return answer[0]

    def wait(self) -> None:
        """Waits for all ranks."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def joined(device: str, batch: int) -> Iterator[World]:
    """Joins the process group that torchrun describes; without torchrun, one process."""
    if (size := processes()) == 1:
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
    quiet_gathers()
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
        destroy_process_group()


def is_of_a_collective(error: Exception) -> bool:
    """Tells whether a collective's backend raised the error. Gloo raises a bare RuntimeError."""
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or "gloo" in str(error)
    )


def collective_of(error: RuntimeError) -> str:
    """Finds the function of torch.distributed that failed, and the line here that called it."""
    frames = traceback.extract_tb(error.__traceback__)
    torchs, ours = Path(dist.__file__).parent, Path(__file__).parents[2]
    names = [f.name for f in frames if torchs in Path(f.filename).parents] or ["a collective"]
    lines = [f.line for f in frames if ours in Path(f.filename).parents]
    return f"{names[-1]} in `{lines[-1]}`"


@contextmanager
def output_folder(world: World, out: Path) -> Iterator[Path]:
    """Yields `out` on rank 0, and a temporary folder on other ranks, which print nothing."""
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


def quiet_gathers() -> None:
    """Drops torch's message that it gathers parameters of two meshes by two collectives."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    logger.addFilter(lambda record: not str(record.msg).startswith("While redistributing"))


def whole(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor on every rank; returns any other unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Scales gradients to a norm of at most `limit`, in place.

    torch.nn.utils.clip_grad_norm_ takes DTensors of one mesh alone. The result is that function's
    otherwise: an infinite norm makes finite gradients 0 and infinite ones NaN, and a NaN makes all
    NaN.

    Args:
        parameters: they may be on several meshes, or have no gradients.
        limit: the largest norm.

    Returns:
        The norm before, of all gradients together, on every rank; 0 where there are none.
    """
    by_mesh: defaultdict[object, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh[getattr(parameter.grad, "device_mesh", None)].append(parameter)
    norms = [
        whole(nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]))
        for group in by_mesh.values()
    ]
    total = torch.stack(norms).norm() if norms else torch.zeros(())
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, limit, total)
    return total


def dropped_rows(model: nn.Module) -> int:
    """Returns the rows that this rank dropped in the last step, after mf.step."""
    return sum(parallel.step_dropped for parallel in divided_experts(model).values())


def forget_dropped(model: nn.Module) -> None:
    """Drops the counts of rows that were dropped since the last step."""
    for parallel in divided_experts(model).values():
        if parallel.dropped is not None:
            parallel.dropped.zero_()
