"""The rows that a capacity's messages have, and the places of the rows."""

import itertools

import pytest
import torch
from minifloat.moe.ranks.dispatch import CapacityRoute


@pytest.mark.parametrize("capacity", [1, 3, 9])
def test_places_of_rows(capacity):
    counts, rows = torch.tensor([4, 0, 2]), 8  # two rows for no expert
    route = CapacityRoute(None, counts, capacity, rows, may_drop=True)
    places = route.places(torch.arange(rows).view(4, 2))
    assert route.rows_from.dtype == places.dtype == torch.int32
    places, found = places.reshape(-1).tolist(), route.rows_from.tolist()
    for place, row in enumerate(found):
        if row >= 0:
            assert places[row] == place
            assert place // capacity == (0 if row < 4 else 2)
    assert all(place < 0 or found[place] == row for row, place in enumerate(places))
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
