"""Gets fprop's codes back where backward runs a forward again, as activation checkpointing does.

The gather before backward frees fprop's codes: it moves dgrad's codes in their place, or dgrad's
are transposed from them. Nothing tells before backward whether a forward will run again, so the
first read gets fprop's codes:

    an eager layer            calls LinearGather.complete or ExpertGather.operands before its op
    compiled code             its ops see that the memory is freed, and call gather_memory
    in mode "one"             the codes are transposed back from dgrad's
    in mode "split"           ranks meet in a handshake by their store, then gather the codes

From then on, each gather before backward keeps fprop's codes in mode "one", and is preceded by a
gather of them in mode "split". A split thus moves fprop's codes twice and dgrad's once. That is
less than both directions twice.
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
