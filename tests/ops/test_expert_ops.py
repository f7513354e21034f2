"""What lies between the products of experts: SwiGLU against fp64, copies against plain indexing."""

from __future__ import annotations

from typing import Any

import minifloat as mf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from minifloat._native import ops
from torch import Tensor

from tests.support.same_bits import bits

DTYPES = (torch.float32, torch.bfloat16)
ALPHA = 1.702

# The relative error of h and of the gradients in fp32: 3 units in the last place of the sigmoid
# (core/swiglu.h), and half a unit for each of at most 7 operations that follow; a sum of
# 1 + alpha * a * (1 - sigmoid) may lose another factor of 4 near its zero, which ABSOLUTE bounds.
RELATIVE, ABSOLUTE = 2.0**-20, 1e-6
BF16_ROUNDING = 2.0**-8  # of one rounding, relative

widths = st.sampled_from([1, 7, 8, 9, 40, 255, 256, 264, 600])
rows_of_x = st.sampled_from([0, 1, 2, 5, 33])


def forms() -> st.SearchStrategy[dict[str, Any]]:
    """Draws the arguments of both ops besides their tensors."""
    return st.fixed_dictionaries(
        {"limit": st.sampled_from([None, 1.0, 7.0]), "alpha": st.sampled_from([1.0, ALPHA])}
    )


def exact_swiglu(gate: Tensor, up: Tensor, weights: Tensor, limit: Any, alpha: float) -> Tensor:
    """Returns h in fp64, differentiably."""
    if limit is None:
        return gate * gate.sigmoid() * up * weights[:, None]
    a, u = gate.clamp(max=limit), up.clamp(-limit, limit)
    return a * (alpha * a).sigmoid() * (u + 1) * weights[:, None]


def misplaced(t: Tensor, offset: int) -> Tensor:
    """Returns t's values in rows of another stride, from an odd address on."""
    if t.dim() != 2 or offset == 0:
        return t
    memory = torch.empty(t.numel() + t.shape[0] * offset + offset, dtype=t.dtype)
    view = memory[offset:].as_strided(t.shape, (t.shape[1] + offset, 1))
    return view.copy_(t)


def draw_inputs(rows: int, width: int, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = ("gate", "up", "dh")
    drawn = {name: torch.randn(rows, width, generator=generator) * 3 for name in names}
    tensors = {name: t.to(dtype) for name, t in drawn.items()}
    return tensors | {"weights": torch.rand(rows, generator=generator)}


def close(found: Tensor, wanted: Tensor, scale: Tensor | float = 1.0) -> None:
    rounding = BF16_ROUNDING if found.dtype == torch.bfloat16 else 0
    bound = wanted.abs() * (RELATIVE + rounding) + ABSOLUTE * scale
    error = (found.double() - wanted).abs()
    assert (error <= bound).all(), f"{(error - bound).max()} above the bound"


@given(rows_of_x, widths, st.sampled_from(DTYPES), forms(), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_values_and_gradients_are_those_of_fp64(rows, width, dtype, form, seed):
    given_ = draw_inputs(rows, width, dtype, seed)
    gate, up, dh, weights = (given_[name] for name in ("gate", "up", "dh", "weights"))
    exact = [t.double().requires_grad_() for t in (gate, up, weights)]
    want = exact_swiglu(*exact, **form)
    close(ops.swiglu(gate, up, weights, **form), want.detach())
    wanted = torch.autograd.grad(want, exact, dh.double())
    d_gate, d_up, d_weights, _ = ops.swiglu_backward(dh, gate, up, weights, **form)
    scale = dh.abs().double() * (up.abs().double() + 1)
    # torch's derivative of clamp is 1 at the bound itself, and so is ours.
    close(d_gate, wanted[0], scale)
    close(d_up, wanted[1], dh.abs().double())
    terms = (dh.double() * exact_swiglu(exact[0], exact[1], torch.ones(rows), **form)).abs().sum(1)
    assert ((d_weights - wanted[2]).abs() <= terms.detach() * 2.0**-19 + 1e-6).all()


@given(rows_of_x, widths, st.sampled_from(DTYPES), forms(), st.integers(0, 3), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_every_layout_gives_the_same_bytes(rows, width, dtype, form, offset, seed):
    """One product or two, gate and up apart or interleaved, at any address."""
    given_ = draw_inputs(rows, width, dtype, seed)
    gate, up, dh, weights = (given_[name] for name in ("gate", "up", "dh", "weights"))
    h = ops.swiglu(gate, up, weights, **form)
    d_gate, d_up, d_weights, _ = ops.swiglu_backward(dh, gate, up, weights, **form)
    two = [misplaced(t, offset) for t in (gate, up)]
    apart = misplaced(torch.cat([gate, up], 1), offset)
    mixed = misplaced(torch.stack([gate, up], 2).flatten(1), offset)
    for product, other, interleaved in ((*two, False), (apart, None, False), (mixed, None, True)):
        where = {**form, "interleaved": interleaved}
        assert torch.equal(ops.swiglu(product, other, weights, **where), h)
        moved = misplaced(dh, offset)
        found = ops.swiglu_backward(moved, product, other, weights, **where)
        assert torch.equal(found[2], d_weights)
        if other is not None:
            parts = found[:2]
        elif interleaved:
            parts = found[0][:, ::2], found[0][:, 1::2]
        else:
            parts = found[0].chunk(2, 1)
        assert torch.equal(parts[0], d_gate)
        assert torch.equal(parts[1], d_up)
        assert other is not None or found[1].numel() == 0


def test_pairs_name_the_weights_and_groups_end_the_rows():
    given_ = draw_inputs(12, 40, torch.bfloat16, 1)
    gate, up, dh = (given_[name] for name in ("gate", "up", "dh"))
    weights, pairs = torch.rand(6, 2), torch.randperm(12).int()
    groups = mf.tensor.group_table(torch.tensor([4, 4, 9], dtype=torch.int32), 12)
    for t in (gate, up, dh):
        t[9:] = float("nan")
    h = ops.swiglu(gate, up, weights, pairs=pairs, groups=groups)
    in_order = weights.flatten()[pairs.long()]
    assert torch.equal(h[:9], ops.swiglu(gate[:9], up[:9], in_order[:9]))
    assert not h[9:].any()
    where = {"pairs": pairs, "groups": groups}
    d_gate, d_up, d_weights, _ = ops.swiglu_backward(dh, gate, up, weights, **where)
    wanted = ops.swiglu_backward(dh[:9], gate[:9], up[:9], in_order[:9])
    assert torch.equal(d_gate[:9], wanted[0])
    assert torch.equal(d_up[:9], wanted[1])
    assert not d_gate[9:].any()
    assert not d_up[9:].any()
    assert d_weights.shape == weights.shape
    assert torch.equal(d_weights.flatten()[pairs.long()][:9], wanted[2])
    assert not d_weights.flatten()[pairs.long()][9:].any()


@pytest.mark.parametrize("form", [{}, {"limit": 1.0}], ids=["silu", "limit"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", ["two", "apart", "interleaved"])
def test_amaxes_are_those_of_the_gradients(parts, dtype, form):
    for rows, width, ends in ((24, 40, [4, 4, 21]), (24, 9, [24]), (3, 8, [0, 0]), (0, 8, [0, 0])):
        given_ = draw_inputs(rows, width, dtype, rows + width)
        gate, up, dh, weights = (given_[name] for name in ("gate", "up", "dh", "weights"))
        dh[1:2, 0] = float("nan")
        groups = mf.tensor.group_table(torch.tensor(ends, dtype=torch.int32), rows)
        other = up if parts == "two" else None
        both = {"two": gate, "apart": torch.cat([gate, up], 1)}
        both["interleaved"] = torch.stack([gate, up], 2).flatten(1)
        where = {**form, "groups": groups, "interleaved": parts == "interleaved"}
        plain = ops.swiglu_backward(dh, both[parts], other, weights, **where)
        found = ops.swiglu_backward(dh, both[parts], other, weights, **where, amaxes=True)
        for a, b in zip(found[:3], plain[:3], strict=True):
            assert torch.equal(bits(a), bits(b))
        assert plain[3] == []
        matrices = found[:2] if other is not None else found[:1]
        assert len(found[3]) == 2 * len(matrices)
        for i, d in enumerate(matrices):
            of_rows, of_columns = found[3][2 * i : 2 * i + 2]
            want = ops.amax(d, "e4m3/row", groups=groups)
            assert torch.equal(bits(of_rows[: ends[-1]]), bits(want[: ends[-1]]))
            want = ops.amax(d, "e4m3/row", True, groups=groups)
            assert torch.equal(bits(of_columns), bits(want.view_as(of_columns)))


def test_the_gradient_of_a_weight_of_no_row_is_zero():
    given_ = draw_inputs(64, 8, torch.float32, 1)
    gate, up, dh = (given_[name] for name in ("gate", "up", "dh"))
    pairs = torch.arange(64).int() // 2 * 2  # the even places, each of two rows
    for _ in range(8):
        freed = torch.full((64,), float("nan"))
        del freed
        d_weights = ops.swiglu_backward(dh, gate, up, torch.ones(64), pairs=pairs)[2]
        assert d_weights[::2].all()
        assert d_weights[1::2].tolist() == [0] * 32


def test_the_weights_gradient_is_summed_in_the_documented_order():
    """256 partial sums, then halves of runs of 8, then halves of 32 runs."""
    torch.manual_seed(0)
    gate, up, dh = (torch.randn(3, 700) for _ in range(3))
    ones = torch.ones(3, 700).flatten()
    column = [t.reshape(-1, 1) for t in (dh, gate, up)]
    terms = ops.swiglu_backward(*column, ones)[2].view(3, 700)
    partial = torch.zeros(3, 256)
    for first in range(0, 700, 256):
        part = terms[:, first : first + 256]
        partial[:, : part.shape[1]] += part
    sums = partial.view(3, 32, 8)
    for half in (4, 2, 1):
        sums = sums[..., :half] + sums[..., half:]
    sums = sums[..., 0]
    for half in (16, 8, 4, 2, 1):
        sums = sums[:, :half] + sums[:, half:]
    assert torch.equal(ops.swiglu_backward(dh, gate, up, torch.ones(3))[2], sums[:, 0])


def test_nan_and_infinity():
    for dtype in DTYPES:
        bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
        nan = torch.tensor([0x7FC00000 if dtype == torch.float32 else 0x7FC0]).to(bits)
        gate = torch.tensor([[float("nan"), -float("nan"), 1, 1, float("inf"), -100]], dtype=dtype)
        up = torch.tensor([[1, 1, float("nan"), float("inf"), 1, 1]], dtype=dtype)
        h = ops.swiglu(gate, up, torch.ones(1))
        assert h.view(bits)[0, :3].eq(nan).all()
        assert h[0, 3:].tolist() == [float("inf"), float("inf"), 0]
        d = ops.swiglu_backward(torch.ones_like(gate), gate, up, torch.ones(1))
        assert d[0].view(bits)[0, :3].eq(nan).all()
        assert d[2].view(torch.int32).item() == 0x7FC00000


# ---- copies --------------------------------------------------------------------------------------


@given(
    st.sampled_from([1, 2, 33]),
    st.integers(1, 8),
    st.sampled_from([(), (1,), (3,), (16,), (130,), (4, 8)]),
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64]),
    st.integers(0, 40),
)
@settings(max_examples=60, deadline=None)
def test_take_rows_is_indexing(tokens, slots, shape, dtype, rows):
    x = torch.randint(0, 200, (tokens, *shape)).to(dtype)
    index = torch.randint(0, tokens * slots, (rows,), dtype=torch.int32)
    found = ops.take_rows(x, index, slots)
    assert found.dtype == dtype
    assert torch.equal(found, x[index.long() // slots])
    assert torch.equal(ops.take_rows(x[::2], index[:0], slots), x[::2][:0])
    index = torch.randperm(tokens * slots).int()
    places = index.argsort().view(tokens, slots).int()
    found = ops.take_rows(x, index, slots, places=places)
    assert torch.equal(found, x[index.long() // slots])
    places = torch.randint(-1, tokens * slots + 1, (tokens, slots), dtype=torch.int32)
    assert torch.equal(ops.take_rows(x, index, slots, places=places), found)


FIELDS = st.tuples(
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64]),
    st.sampled_from([None, 1, 3, 16, 65, 128]),  # columns; None: one dimension
    st.sampled_from([0, 1, 3]),  # slots
)


@given(st.integers(0, 9), st.lists(FIELDS, min_size=1, max_size=6))
@settings(max_examples=80, deadline=None)
def test_pack_rows_is_side_by_side(tokens, kinds):
    """Compares with a loop over fields, which places them by their bytes."""
    index = torch.randint(0, 3 * tokens, (tokens,), dtype=torch.int32) if tokens else None
    fields, parts, end = [], [], 0
    for dtype, columns, slots in kinds:
        shape = (tokens,) if columns is None else (tokens, columns)
        if slots == 1:
            shape = (3 * tokens, *shape[1:])
        field = torch.randint(0, 200, shape).to(dtype)
        rows = field if slots == 0 or index is None else field[index.long() // slots]
        begin = -(-end // 4) * 4
        end = begin + (columns or 1) * dtype.itemsize
        parts.append((begin, end, rows.reshape(tokens, columns or 1)))
        fields.append(misplaced(field, 1))
    want = torch.zeros(tokens, -(-end // 16) * 16, dtype=torch.uint8)
    for begin, stop, rows in parts:
        want[:, begin:stop] = rows.contiguous().view(torch.uint8)
    slots = [slots if index is not None else 0 for _, _, slots in kinds]
    assert torch.equal(ops.pack_rows(fields, index, slots=slots), want)
    rows_from = torch.randint(-1, tokens, (2 * tokens + 1,), dtype=torch.int32)
    chosen = want.new_zeros(2 * tokens + 1, want.shape[1])
    chosen[rows_from >= 0] = want[rows_from[rows_from >= 0]]
    found = ops.pack_rows(fields, index, slots=slots, rows_from=rows_from)
    assert torch.equal(found, chosen)
    sizes = [(columns or 1) * dtype.itemsize for dtype, columns, _ in kinds]
    assert ops.row_layout(sizes) == [*(begin for begin, _, _ in parts), want.shape[1]]


@given(st.integers(0, 9), st.integers(0, 8), widths, st.sampled_from(DTYPES), st.booleans())
@settings(max_examples=60, deadline=None)
def test_add_slots_is_a_loop(tokens, slots, cols, dtype, has_base):
    rows = torch.randn(tokens * slots + 1, cols).to(dtype)
    places = torch.randint(0, rows.shape[0], (tokens, slots), dtype=torch.int32)
    base = torch.randn(tokens, cols) if has_base else None
    total = torch.zeros(tokens, cols) if base is None else base.clone()
    for slot in range(slots):
        total += rows[places[:, slot].long()].float()
    assert torch.equal(ops.add_slots(rows, places, base), total.to(dtype))
    assert torch.equal(ops.add_slots(misplaced(rows, 1), places, base), total.to(dtype))


# ---- errors --------------------------------------------------------------------------------------

NAN = float("nan")
X = torch.zeros(4, 6)
ONES = torch.ones(4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.swiglu(X[:, :5], None, ONES), "gate and up of the same width, got 5"),
        (lambda: ops.swiglu(X, X[:, :5], ONES), r"expected other as Float \(4, 6\), got Float"),
        (lambda: ops.swiglu(X, X, ONES, interleaved=True), "interleaved of one product, got two"),
        (lambda: ops.swiglu(X, None, ONES, limit=NAN), "swiglu: expected limit above 0.*got nan"),
        (lambda: ops.swiglu(X, None, ONES, limit=0.0), "expected limit above 0.*got 0"),
        (lambda: ops.swiglu(X, None, ONES, limit=-7.0), "expected limit above 0.*got -7"),
        (lambda: ops.swiglu(X, None, ONES, limit=1e39), r"expected limit above 0.*got 1e\+39"),
        (lambda: ops.swiglu(X, None, ONES, limit=7.0, alpha=NAN), "alpha above 0.*got nan"),
        (lambda: ops.swiglu(X, None, ONES, alpha=-1.0), "alpha above 0.*got -1"),
        (
            lambda: ops.swiglu_backward(X[:, :3], X, None, ONES, limit=0.0),
            "swiglu_backward: expected limit above 0.*got 0",
        ),
        (lambda: ops.swiglu(X, None, ONES[:3]), "one for each of 4 rows, got Float"),
        (lambda: ops.swiglu(X, None, ONES.bfloat16()), "weights as float32"),
        (lambda: ops.swiglu(X.half(), None, ONES), "product in float32 or bfloat16, got Half"),
        (lambda: ops.swiglu(X, None, ONES, pairs=torch.arange(4)), "pairs as int32"),
        (
            lambda: ops.swiglu(X, None, ONES, pairs=torch.arange(4).int() + 1),
            "expected places of 0 to 3, got 4 at 3",
        ),
        (
            lambda: ops.swiglu_backward(X, X, X, ONES, amaxes=True),
            "swiglu_backward: expected groups with amaxes, got none",
        ),
        (lambda: ops.swiglu_backward(X, X, None, ONES), r"expected dh as Float \(4, 3\)"),
        (lambda: ops.take_rows(X, torch.arange(3)), "index as int32 of 1 dimension, got Long"),
        (lambda: ops.take_rows(X, torch.arange(3).int(), 0), "slots, got 0"),
        (lambda: ops.take_rows(X, torch.tensor([8]).int(), 2), "rows of 0 to 7, got 8 at 0"),
        (
            lambda: ops.take_rows(X, torch.arange(4).int(), places=torch.zeros(4, 2).int()),
            r"places as \(4, 1\) for 4 rows, got \[4, 2\]",
        ),
        (lambda: ops.pack_rows([X] * 7), "expected 1 to 6 fields, got 7"),
        (lambda: ops.pack_rows([X[None]]), "dense fields of 1 or 2 dimensions, got Strided of 3"),
        (lambda: ops.pack_rows([X, X[:3]]), "expected fields of 4 rows, got 3"),
        (lambda: ops.pack_rows([X], slots=[1]), "an index of a field with slots, got none"),
        (lambda: ops.pack_rows([X], ONES.int(), slots=[1, 1]), "slots of each of 1 fields, got 2"),
        (lambda: ops.pack_rows([X], ONES.int(), slots=[-1]), "0 to 2\\^31 - 1 slots, got -1"),
        (lambda: ops.pack_rows([X], ONES, slots=[1]), "index as int32 of 1 dimension, got Float"),
        (lambda: ops.pack_rows([X], ONES.int() * 8, slots=[2]), "rows of 0 to 7, got 8 at 0"),
        (lambda: ops.row_layout([4, -1]), "row_layout: expected bytes"),
        (lambda: ops.pack_rows([X], rows_from=ONES), "rows_from as int32 of 1 dimension"),
        (lambda: ops.pack_rows([X], rows_from=ONES.int() * 4), "rows_from of -1 to 3, got 4 at 0"),
        (lambda: ops.pack_rows([X], rows_from=ONES.int() * -2), "of -1 to 3, got -2 at 0"),
        (lambda: ops.add_slots(X, torch.tensor([[4]]).int()), "places of -1 to 3, got 4 at 0"),
        (
            lambda: ops.add_slots(X, torch.tensor([[1]]).int(), X[:1].double()),
            r"base as float32 \[1, 6\], got Double",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_derivatives():
    x, weights = torch.randn(4, 6, requires_grad=True), torch.rand(2, 2, requires_grad=True)
    pairs = torch.tensor([2, 0, 3, 1]).int()
    h = ops.swiglu(x, None, weights, pairs=pairs)
    g = torch.randn_like(h)
    d_x, d_weights = torch.autograd.grad(h, (x, weights), g, create_graph=True)
    inputs = (g, x.detach(), None, weights.detach())
    d_product, _, expected, _ = ops.swiglu_backward(*inputs, pairs=pairs)
    assert torch.equal(d_x, d_product)
    assert torch.equal(d_weights, expected)
    with pytest.raises(RuntimeError, match="swiglu_backward"):
        d_x.sum().backward()
    # Copies are linear: their derivatives are each other's.
    places = pairs.argsort().int().view(2, 2)
    tokens = torch.randn(2, 3, dtype=torch.float32, requires_grad=True)
    rows = ops.take_rows(tokens, pairs, 2, places=places)
    y = ops.add_slots(rows, places, pairs=pairs)
    assert torch.equal(y, 2 * tokens)
    (d_tokens,) = torch.autograd.grad(y, tokens, torch.ones_like(y), create_graph=True)
    assert torch.equal(d_tokens, torch.full_like(tokens, 2))
    for result, name in (
        (ops.take_rows(tokens, pairs, 2), "take_rows: expected places"),
        (ops.add_slots(rows, places), "add_slots: expected pairs"),
    ):
        with pytest.raises(ValueError, match=name):
            result.sum().backward()
