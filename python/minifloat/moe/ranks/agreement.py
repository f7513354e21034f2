"""The layers of an expert-parallel group's ranks: they must be equal, at first and in each forward.

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
from .dropped import to_host

DIVIDE = "expert_parallel: expected all {} ranks to divide {}"
EQUAL = "expert_parallel: expected all ranks to have the same layer"


class Agreement:
    """The title that all ranks of a group were seen to have.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.title: str | None = None  # None: before the first forward
        self._number: Tensor | None = None  # of the title that was sent last
        self._sent: str | None = None

    def begin(self, title: str, device: torch.device) -> Tensor:
        """Begins a forward, and returns the number that this rank sends, int64 (1).

        Raises:
            ValueError: on every rank, where the titles of first forwards differ or a rank is
                missing.
        """
        if self._number is None or self._sent != title or self._number.device != device:
            self._number = torch.full((1,), ops.stream(title), dtype=torch.int64, device=device)
            self._sent = title
        if self.title is None:
            wait_for_all(
                title, self.group, device, expected=DIVIDE, change="divided", key="divided"
            )
            found = self._number.new_empty(dist.get_world_size(self.group))
            dist.all_gather_into_tensor(found, self._number, group=self.group)
            self.compare_on_all(title, to_host(found))
        return self._number

    def compare_on_all(self, title: str, numbers: list[int]) -> None:
        """Compares the titles' numbers, on all ranks.

        Raises:
            ValueError: on every rank, with the titles of all, where they differ.
        """
        require_equal(title, numbers, self.group, EQUAL)
        self.title = title

    def compare_changed(self, title: str, numbers: Tensor) -> None:
        """Compares the titles' numbers where this rank's has changed; other ranks may not.

        Raises:
            ValueError: on this rank, where other ranks have another title.
        """
        if title == self.title:
            return
        found, rank = to_host(numbers), dist.get_rank(self.group)
        others = [i for i, number in enumerate(found) if number != found[rank]]
        if others:
            raise ValueError(
                f"{EQUAL}, but rank {rank} has {title} now, and ranks {others} have not; before, "
                f"all had {self.title}"
            )
        self.title = title
