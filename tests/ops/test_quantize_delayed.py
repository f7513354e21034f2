"""quantize_delayed: codes by the active amax of a history, whose current amax the cast raises."""

import itertools
import re

import minifloat as mf
import pytest
import torch

from tests.support.same_bits import same_bytes

ops = torch.ops.minifloat
RNG = torch.tensor([1, 2])
SPECS = ["", "e4m3/tensor+delayed", "e5m2/tensor+delayed+sr", "e4m3/tensor+delayed+rht", "nvfp4"]
ROW, COL = 2, 5  # of a history of six operands


def history_of(shape):
    g = torch.Generator().manual_seed(3)
    history = torch.rand(shape, generator=g) * 4
    history[4] = float("nan")
    return history


def require_same_as_two_steps(x, row, col, history, **options):
    """Compares the op with quantize, then a raise of the history by the amaxes that it returns."""
    found, want = history.clone(), history.clone()
    got = ops.quantize_delayed(x, row, col, found, ROW, COL, rng=RNG, **options)
    is_delayed = ["delayed" in row, "delayed" in col]
    given = [history[place, ..., 0] if d else None for d, place in zip(is_delayed, (ROW, COL))]
    parts = ops.quantize(x, row, col, amax_row=given[0], amax_col=given[1], rng=RNG, **options)
    for i, delayed in ((2, is_delayed[0]), (6, is_delayed[1])):
        if delayed:
            current = want[ROW if i == 2 else COL, ..., 1]
            current.copy_(torch.maximum(current, parts[i]))
            assert got[i].numel() == 0
    for i, (a, b) in enumerate(zip(got, parts, strict=True)):
        if not (i in (2, 6) and is_delayed[i // 4]):
            assert same_bytes(a, b), i
    assert torch.equal(found.isnan(), want.isnan())
    assert torch.equal(found.nan_to_num(-1), want.nan_to_num(-1))


@pytest.mark.parametrize(("row", "col"), list(itertools.product(SPECS, SPECS)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_history_are_those_of_two_steps(row, col, dtype):
    if not row and not col:
        return
    torch.manual_seed(0)
    for shape, largest in (((33, 48), 1.0), ((128, 128), 100.0), ((64, 72), float("nan"))):
        x = torch.randn(shape).to(dtype)
        x[1, 3] = largest
        for decoded in (False, True):
            options = {"decoded_row": decoded, "stream_col": 7}
            require_same_as_two_steps(x, row, col, history_of((6, 4)), **options)


@pytest.mark.parametrize("row", SPECS)
def test_experts_have_a_row_each(row):
    torch.manual_seed(1)
    x, history = torch.randn(40, 64), history_of((6, 3, 4))
    table = ops.group_table(torch.tensor([8, 8, 30], dtype=torch.int32), 40)
    col = SPECS[1]
    found, want = history.clone(), history.clone()
    ops.quantize_delayed(x, row, col, found, ROW, COL, rng=RNG, groups=table)
    given = history[ROW, :, 0] if "delayed" in row else None
    parts = ops.quantize(
        x, row, col, amax_row=given, amax_col=history[COL, :, 0], rng=RNG, groups=table
    )
    for place, i in ((ROW, 2), (COL, 6)):
        if i == 6 or "delayed" in row:
            want[place, :, 1] = torch.maximum(want[place, :, 1], parts[i])
    assert torch.equal(found[:4], want[:4])
    assert torch.equal(found[5], want[5])
    weights = torch.randn(3, 24, 64, dtype=torch.bfloat16)
    if row and "nvfp4" not in row:
        require_same_as_two_steps(weights, row, col, history)


def test_an_empty_cast_leaves_the_history():
    history = history_of((6, 4))
    found = history.clone()
    spec = SPECS[1]
    ops.quantize_delayed(torch.empty(0, 32), spec, spec, found, ROW, COL)
    assert torch.equal(found[ROW], history[ROW])
    assert torch.equal(found[COL], history[COL])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"amax_history": torch.zeros(6)}, "amax_history as float32"),
        ({"amax_history": torch.zeros(6, 1)}, "amax_history as float32"),
        ({"amax_history": torch.zeros(6, 4, dtype=torch.float64)}, "amax_history as float32"),
        ({"amax_history": torch.zeros(6, 1).expand(6, 4)}, "memory for each entry"),
        ({"amax_history": torch.zeros(6, 2, 4)}, "amax as float32"),
        ({"history_row": 6}, "rows of 6 operands, got 6"),
        ({"history_col": -1}, "rows of 6 operands, got -1"),
    ],
)
def test_refusals(change, message):
    arguments = {"amax_history": torch.zeros(6, 4), "history_row": 0, "history_col": 1, **change}
    x = torch.ones(16, 32)
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.quantize_delayed(x, SPECS[1], SPECS[1], **arguments)
    arguments["amax_history"] = arguments["amax_history"].to("meta").contiguous()
    if message != "memory for each entry":  # which the copy has
        with pytest.raises(ValueError, match=re.escape(message)):
            ops.quantize_delayed(x.to("meta"), SPECS[1], SPECS[1], **arguments)


def test_layers_raise_their_history_in_the_cast():
    """Compares a layer's history with the amaxes of its operands, over two micro-batches."""
    torch.manual_seed(2)
    history, w = torch.zeros(6, 4), torch.randn(32, 48)
    largest = torch.zeros(3)
    for scale in (1.0, 0.5):
        x = (torch.randn(24, 48) * scale).requires_grad_()
        g = torch.randn(24, 32) * scale
        mf.linear(x, w.requires_grad_(), None, "fp8_delayed", amax_history=history).backward(g)
        largest = largest.maximum(torch.stack([t.detach().abs().max() for t in (x, w, g)]))
    x, w, g = largest.tolist()
    assert history[:, 1].tolist() == [x, w, g, w, g, x]
    assert history[:, 2:].eq(0).all()
    assert history[:, 0].eq(0).all()
