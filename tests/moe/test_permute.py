"""The order of rows by expert, and the copies between tokens and rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from minifloat.moe.feed_forward import add_slots, order_rows, take_rows

SIZES = ((0, 2, 3), (1, 1, 1), (5, 1, 4), (7, 3, 3), (33, 8, 40), (64, 2, 300))


def random_indices(tokens: int, slots: int, experts: int, seed: int = 0) -> torch.Tensor:
    """Draws distinct experts for each token."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    return scores.topk(slots, dim=1).indices


def loop_order(indices: torch.Tensor, experts: int) -> tuple[list[int], list[int]]:
    """Returns the pairs of each row, and the end of each expert, by plain loops."""
    flat = indices.reshape(-1).tolist()
    pairs = [i for e in range(experts) for i, chosen in enumerate(flat) if chosen == e]
    ends = [sum(chosen <= e for chosen in flat) for e in range(experts)]
    return pairs + [i for i, chosen in enumerate(flat) if chosen >= experts], ends


@pytest.mark.parametrize(("tokens", "slots", "experts"), SIZES)
def test_order_is_that_of_a_loop(tokens, slots, experts):
    indices = random_indices(tokens, slots, experts)
    order = order_rows(indices, experts)
    pairs, ends = loop_order(indices, experts)
    assert order.pairs.tolist() == order.row_ids.tolist() == pairs
    assert order.offs.tolist() == ends
    assert {t.dtype for t in order} == {torch.int32}
    rows = order.places.reshape(-1).tolist()
    assert [order.pairs[row] for row in rows] == list(range(tokens * slots))


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_order_of_any_indices(data):
    experts, slots = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    row = st.lists(st.integers(0, experts), min_size=slots, max_size=slots)
    indices = torch.tensor(data.draw(st.lists(row, max_size=12)), dtype=torch.int64)
    indices = indices.reshape(-1, slots)
    order = order_rows(indices, experts)
    pairs, ends = loop_order(indices, experts)
    assert order.pairs.tolist() == order.row_ids.tolist() == pairs
    assert order.offs.tolist() == ends


def test_order_by_token_ids():
    indices = random_indices(9, 3, 5)
    ids = torch.tensor([70, 3, 50, 4, 11, 12, 90, 2, 8])
    order = order_rows(indices, 5, ids)
    by_id = ids.argsort()
    expected = order_rows(indices[by_id], 5)
    assert torch.equal(order.offs, expected.offs)
    assert torch.equal(order.pairs // 3, by_id[expected.pairs // 3].int())
    assert torch.equal(order.pairs % 3, expected.pairs % 3)
    assert torch.equal(order.row_ids, (ids[order.pairs // 3] * 3 + order.pairs % 3).int())
    assert torch.equal(order.pairs[order.places.reshape(-1)], torch.arange(27).int())


def test_indices_of_one_byte():
    indices = torch.tensor([[255, 0], [7, 255]])
    for found, expected in zip(order_rows(indices.to(torch.uint8), 256), order_rows(indices, 256)):
        assert torch.equal(found, expected)


def test_slots_without_an_expert_are_past_the_last_end():
    order = order_rows(torch.tensor([[0, 9], [-1, 1]]), 2)
    assert order.offs.tolist() == [1, 2]
    assert order.row_ids.tolist() == [0, 3, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "slots", "experts"), SIZES)
def test_copies_are_those_of_a_loop(tokens, slots, experts, dtype):
    torch.manual_seed(1)
    order = order_rows(random_indices(tokens, slots, experts), experts)
    x = torch.randn(tokens, 24, dtype=dtype, requires_grad=True)
    rows = take_rows(x, order)
    expected = [x.detach()[pair // slots] for pair in order.pairs.tolist()]
    torch.testing.assert_close(list(rows.detach()), expected, rtol=0, atol=0)

    values = torch.randn(tokens * slots, 24, dtype=dtype)
    sums = torch.zeros(tokens, 24)
    for token, places in enumerate(order.places.tolist()):
        for place in places:
            sums[token] += values[place].float()
    (gradient,) = torch.autograd.grad(rows, x, values)
    torch.testing.assert_close(gradient, sums.to(dtype), rtol=0, atol=0)

    values.requires_grad_()
    base = torch.randn(tokens, 24, requires_grad=True)
    y = add_slots(values, order)
    torch.testing.assert_close(y.detach(), sums.to(dtype), rtol=0, atol=0)
    g = torch.randn(tokens, 24, dtype=dtype)
    d_values, d_base = torch.autograd.grad(add_slots(values, order, base), (values, base), g)
    expected = [g[pair // slots] for pair in order.pairs.tolist()]
    torch.testing.assert_close(list(d_values), expected, rtol=0, atol=0)
    torch.testing.assert_close(d_base, g.float(), rtol=0, atol=0)


def test_add_slots_starts_with_the_base():
    order = order_rows(torch.tensor([[0, 1]]), 2)
    rows = torch.tensor([[-(2.0**30)], [1.0]])
    assert add_slots(rows, order, torch.tensor([[2.0**30]])).item() == 1.0
