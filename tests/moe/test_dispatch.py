"""The rows that a capacity's buffers have, and the copies that fill them."""

import itertools

import pytest
import torch
from minifloat.moe.ranks.dispatch import CapacityRoute, take_or_zero
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """The most elements of a tensor of bytes that an op returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.uint8:
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_take_or_zero(rows):
    values = torch.randint(1, 256, (rows, 16), dtype=torch.uint8)
    numbers = torch.tensor([0, 6, 7, 3, 0, 99]).clamp(max=99).int()
    with Largest() as seen:
        found = take_or_zero(values, numbers)
    for row, number in zip(found, numbers.tolist()):
        expected = values[number] if number < rows else torch.zeros(16, dtype=torch.uint8)
        assert torch.equal(row, expected)
    assert seen.elements <= found.numel()


def test_rows_are_not_copied_besides_those_taken():
    values, numbers = torch.ones(1000, 16, dtype=torch.uint8), torch.tensor([1, 1000]).int()
    with Largest() as seen:
        take_or_zero(values, numbers)
    assert seen.elements <= 2 * 16


@pytest.mark.parametrize("capacity", [1, 3, 9])
def test_places_of_rows(capacity):
    counts, rows = torch.tensor([4, 0, 2]), 8  # two rows for no expert
    route = CapacityRoute(None, counts, capacity, rows, may_drop=True)
    assert route.row_of_place.dtype == route.place_of_row.dtype == torch.int32
    for place, row in enumerate(route.row_of_place.tolist()):
        if row < rows:
            assert route.place_of_row[row] == place
            assert place // capacity == (0 if row < 4 else 2)
    kept = [min(c, capacity) for c in counts.tolist()]
    assert int(route.is_sent.sum()) == sum(kept)
    assert int(route.dropped) == 6 - sum(kept)
    assert route.sent_groups(OFFS) is not None
    assert CapacityRoute(None, counts, capacity, rows, may_drop=False).sent_groups(OFFS) is None


OFFS = torch.tensor([1, 4, 4, 4, 4, 6]).int()  # of two experts on each of three ranks


@pytest.mark.parametrize(
    ("capacity", "sent"), [(1, [[0], [], [], [], [], [4]]), (3, [[0], [1, 2], [], [], [], [4, 5]])]
)
def test_groups_of_the_rows_that_are_sent(capacity, sent):
    route = CapacityRoute(None, torch.tensor([4, 0, 2]), capacity, 8, may_drop=True)
    numbers, table = route.sent_groups(OFFS)
    assert numbers.shape == (8,)
    ends = table[0].tolist()
    assert [numbers[a:b].tolist() for a, b in itertools.pairwise(ends)] == sent
