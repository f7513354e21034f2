"""The rows that a capacity's messages have, and the positions of the rows."""

import itertools

import pytest
import torch
from minifloat.moe.feed_forward import order_rows
from minifloat.moe.ranks.dispatch import CapacityPlan

EXPERTS = 6  # two on each of three ranks
CHOSEN = torch.tensor([[1, 0], [-1, 1], [5, 1], [5, -1]])  # of two slots of four tokens


def plan_of(capacity, may_drop=True):
    """Plans the exchange of four rows for rank 0, none for rank 1 and two for rank 2."""
    order = order_rows(CHOSEN, EXPERTS)
    return CapacityPlan(
        order=order,
        pair_ids=order.pairs,
        local_experts=order.pairs,
        group=None,
        send_counts=torch.tensor([4, 0, 2]),
        capacity=capacity,
        may_drop=may_drop,
    )


@pytest.mark.parametrize("capacity", [1, 3, 9])
def test_positions_of_rows(capacity):
    plan = plan_of(capacity)
    positions, rows_from = plan.slot_positions(), plan.rows_from
    assert rows_from.dtype == positions.dtype == torch.int32
    assert positions.shape == CHOSEN.shape
    row_of_slot = plan.order.places.reshape(-1).tolist()
    found = dict(zip(row_of_slot, positions.reshape(-1).tolist()))
    rows_from = rows_from.tolist()
    for position, row in enumerate(rows_from):
        if row >= 0:
            assert found[row] == position
            assert position // capacity == (0 if row < 4 else 2)
    assert all(at < 0 or rows_from[at] == row for row, at in found.items())
    kept = [min(count, capacity) for count in (4, 0, 2)]
    assert sum(at >= 0 for at in found.values()) == sum(kept)
    assert int(plan.dropped) == 6 - sum(kept)
    assert plan.kept_rows() is not None
    assert plan_of(capacity, may_drop=False).kept_rows() is None


@pytest.mark.parametrize(
    ("capacity", "sent"), [(1, [[0], [], [], [], [], [4]]), (3, [[0], [1, 2], [], [], [], [4, 5]])]
)
def test_groups_of_the_rows_that_are_sent(capacity, sent):
    plan = plan_of(capacity)
    assert plan.order.offs.tolist() == [1, 4, 4, 4, 4, 6]
    numbers, table = plan.kept_rows()
    assert numbers.shape == (8,)
    ends = table[0].tolist()
    assert [numbers[a:b].tolist() for a, b in itertools.pairwise(ends)] == sent
