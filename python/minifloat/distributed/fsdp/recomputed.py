"""Weights whose forward backward runs again, as activation checkpointing does.

Such a forward reads fprop's codes. After backward's gather their memory is free: it moves dgrad's
codes, or dgrad's are transposed from them. No code says before backward what it will read, so the
first read brings fprop's codes back:

    an eager layer                 asks before its op: WeightGather.complete, ExpertGather.operands
    compiled code                  its ops find freed memory, and call gather_memory
    then, in mode "one"            the codes are transposed back
    then, in mode "split"          the ranks find in their store that all of them read, and gather

From then on each gather before backward keeps fprop's codes, or in mode "split" follows a gather of
them. So a split moves fprop's codes twice and dgrad's once, less than both directions twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from .gather import Gather

EXPECTED = "fully_shard: expected all {} ranks to run the forward of {} again in backward"
GATHERS: weakref.WeakSet[Gather] = weakref.WeakSet()  # that have received codes
LIBRARY = torch.library.Library("minifloat_fsdp", "DEF")
LIBRARY.define("gather_memory(Tensor memory) -> ()")


def note_reading(selection: int, reader: Gather, gathers: Sequence[Gather]) -> None:
    """Notes that weights are read in a direction that FSDP2's gather has not brought.

    Waits for all ranks at the first time, where they are to gather the direction.

    Args:
        selection: the gather that brings it.
        reader: the gather of the weight that is read.
        gathers: those of the weights that FSDP2 gathers together with it.

    Raises:
        ValueError: other ranks do not read the weight.
    """
    if selection in reader.on_demand:
        return
    if reader.world > 1 and any([gather.plan.mode == "split" for gather in gathers]):
        reader.meet("the gather in backward of", EXPECTED, "their layer is not recomputed")
    for gather in gathers:
        gather.on_demand.add(selection)


@torch.library.impl(LIBRARY, "gather_memory", "CompositeExplicitAutograd")
def gather_memory(memory: Tensor) -> None:
    """Brings back the direction whose freed memory an op reads, on all ranks.

    Args:
        memory: a tensor without memory, of a gathered weight or any other.

    Raises:
        ValueError: as note_reading.
    """
    storage = memory.untyped_storage()._cdata
    for gather in list(GATHERS):
        selection = gather.lacking(storage)
        if selection is not None:
            gather.note_reading(selection)
            gather.bring(selection)
