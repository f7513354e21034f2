"""Batches as a pure function of (seed, step): a resumed run needs no loader state.

The ids are cut into chunks of `seq` tokens (and one more, the last target). Epoch e visits the
chunks in the order of a permutation drawn from (seed, e); step s takes the chunks at places
s * batch to (s + 1) * batch - 1 of that endless sequence.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


class Batches:
    """Training and validation batches of (inputs, targets), each (batch, seq) int64."""

    def __init__(self, train: np.ndarray, validation: np.ndarray, seq: int, batch: int) -> None:
        self.train, self.validation, self.seq, self.batch = train, validation, seq, batch
        self.chunks = (len(train) - 1) // seq
        self.order = lru_cache(maxsize=4)(self._order)

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        return np.random.default_rng([seed, epoch]).permutation(self.chunks)

    def training(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Returns the batch of a step (from 0)."""
        places = range(step * self.batch, (step + 1) * self.batch)
        chunks = [self.order(seed, p // self.chunks)[p % self.chunks] for p in places]
        return self._gather(self.train, chunks)

    def validation_set(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Returns at most `count` batches, spread evenly over the validation text."""
        chunks = (len(self.validation) - 1) // self.seq
        count = min(count, chunks // self.batch)
        spread = np.linspace(0, chunks - 1, count * self.batch).round().astype(np.int64)
        return [self._gather(self.validation, rows) for rows in spread.reshape(count, self.batch)]

    def _gather(self, ids: np.ndarray, chunks) -> tuple[Tensor, Tensor]:
        rows = [ids[c * self.seq : c * self.seq + self.seq + 1].astype(np.int64) for c in chunks]
        rows_BS = torch.from_numpy(np.stack(rows))
        return rows_BS[:, :-1].contiguous(), rows_BS[:, 1:].contiguous()
