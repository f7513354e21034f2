"""Checks that all ranks of a group run the same layer: at first and in each forward.

A title describes a layer's configuration; ranks compare its 64-bit number.

first forward     ranks wait for each other, and compare their layers' titles
later             each rank sends its title's number with its counts of rows
    exact sizes   every rank reads the numbers of all ranks with the counts
    else          a rank reads them where its own title has changed: nothing waits otherwise
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..._native import ops
from ...distributed.handshake import require_equal, wait_for_all

DIVIDE = "expert_parallel: expected all {} ranks to divide {}"
EQUAL = "expert_parallel: expected all ranks to have the same layer"


def to_host(numbers: Tensor) -> list[int]:
    """Copies numbers to the host, and waits for the device.

    No other function of a forward does.
    """
    return numbers.tolist()


class Agreement:
    """The title that all ranks of a group were seen to have.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.title: str | None = None  # None: before the first forward

    def begin(self, title: str, device: torch.device) -> Tensor:
        """Begins a forward, and returns the number that this rank sends, int64 (1).

        Raises:
            ValueError: on every rank, where the titles of first forwards differ or a rank is
                missing.
        """
        number = torch.full((1,), ops.stream(title), dtype=torch.int64, device=device)
        if self.title is None:
            wait_for_all(
                title, self.group, device, expected=DIVIDE, change="divided", key="divided"
            )
            found = number.new_empty(dist.get_world_size(self.group))
            dist.all_gather_into_tensor(found, number, group=self.group)
            self.compare(title, found, is_on_all=True)
        return number

    def compare(self, title: str, numbers: Tensor | list[int], is_on_all: bool) -> None:
        """Compares the titles' numbers, on all ranks or where this rank's title has changed.

        Raises:
            ValueError: ranks differ: on every rank, with the titles of all, or on this rank.
        """
        if not is_on_all and title == self.title:
            return
        found = to_host(numbers) if isinstance(numbers, Tensor) else numbers
        if is_on_all:
            require_equal(title, found, self.group, EQUAL)
        rank = dist.get_rank(self.group)
        others = [i for i, number in enumerate(found) if number != found[rank]]
        if others:
            raise ValueError(
                f"{EQUAL}, but rank {rank} has {title} now, and ranks {others} have not; before, "
                f"all had {self.title}"
            )
        self.title = title
