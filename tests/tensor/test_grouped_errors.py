"""Errors of calls with groups: each is one ValueError with the expected and the actual value."""

from contextlib import contextmanager, nullcontext

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tensor.test_groups import int32

X, W = torch.ones(40, 32), torch.ones(2, 32, 16)
ROW_TABLE = mf.tensor.group_table(int32([8, 40]), 40)


@pytest.mark.parametrize("spec", ["e4m3/128x128", "mxfp8/32x32", "nvfp4/16x16", "nvfp4/16x16+up"])
def test_2d_blocks_are_refused_by_name(spec):
    for columnwise in (False, True):
        with pytest.raises(ValueError, match=f"quantize: {spec}".replace("+", r"\+")):
            mf.tensor.quantize(X, spec, columnwise=columnwise, groups=ROW_TABLE)
    q = mf.tensor.quantize(X, spec)
    amax = q.amax.expand(2) if "nvfp4" in spec else q.amax
    with pytest.raises(ValueError, match=f"dequantize: {spec}".replace("+", r"\+")):
        ops.dequantize(q.codes, q.scale, amax, q.spec, 32, groups=ROW_TABLE)
    if "nvfp4" in spec:
        with pytest.raises(ValueError, match=f"amax: {spec}".replace("+", r"\+")):
            mf.tensor.amax(X, spec, groups=ROW_TABLE)


def bad_table(row, entry, value):
    table = ROW_TABLE.clone()
    table[row, entry] = value
    return table


def without_memory(*shape):
    x = torch.ones(*shape)
    x.untyped_storage().resize_(0)
    return x


GROUPED = mf.tensor.quantize(X, "mxfp8", columnwise=True, groups=ROW_TABLE)
COLUMNS = ops.quantize(X, "", "e4m3/1x128", groups=ROW_TABLE)[4:]
BAD_CALLS = {
    "offs of int64": (
        lambda: mf.tensor.group_table(torch.tensor([3, 4]), 40),
        r"group_table: expected offs as int32 \(groups\), got Long",
    ),
    "offs of 2 dimensions": (
        lambda: mf.tensor.group_table(int32([[3, 4]]), 40),
        r"group_table: expected offs as int32 \(groups\), got Int \[1, 2\]",
    ),
    "1,024 groups": (
        lambda: mf.tensor.group_table(int32([0] * 1024), 40),
        "group_table: expected at most 1023 groups, got 1024",
    ),
    "negative rows": (
        lambda: mf.tensor.group_table(int32([3]), -1),
        "group_table: expected rows from 0",
    ),
    "too many rows": (
        lambda: mf.tensor.group_table(int32([3]), 2**31 - 200),
        r"expected 0 to 2\^31 - 128 \* \(groups \+ 1\) rows, got 2147483448",
    ),
    "A without memory": (
        lambda: mf.functional.scaled_grouped_mm(without_memory(40, 32), W, int32([8, 40]), "mxfp8"),
        "scaled_grouped_mm: expected A in memory",
    ),
    "a gradient without memory": (
        lambda: ops.scaled_grouped_mm_backward(
            without_memory(40, 16), X, W, int32([8, 40]), "mxfp8", [True] * 3,
        ),
        "scaled_grouped_mm: expected grad in memory",
    ),
    "x of layer_operands without memory": (
        lambda: ops.layer_operands(without_memory(40, 32), "mxfp8", "x"),
        "layer_operands: expected x in memory",
    ),
    "groups on meta": (
        lambda: mf.tensor.quantize(X, "mxfp8", groups=ROW_TABLE.to("meta")),
        "quantize: expected groups on cpu, got meta",
    ),
    "offs for groups": (
        lambda: mf.tensor.quantize(X, "mxfp8", groups=int32([8, 40])),
        r"quantize: expected groups as group_table returns them, .* got Int \[2\]",
    ),
    "groups of int64": (
        lambda: mf.tensor.quantize(X, "mxfp8", groups=ROW_TABLE.long()),
        "quantize: expected groups as group_table returns them, .* got Long",
    ),
    "a table with strides": (
        lambda: mf.tensor.quantize(X, "mxfp8", groups=ROW_TABLE.t().contiguous().t()),
        "quantize: expected contiguous groups",
    ),
    "a table of more rows": (
        lambda: mf.tensor.quantize(X, "mxfp8", groups=mf.tensor.group_table(int32([41]), 41)),
        "quantize: expected groups as .*, with the last end at most 40, got the end 41",
    ),
    "a table whose boundaries fall": (
        lambda: mf.tensor.quantize(X, "mxfp8", groups=bad_table(0, 1, 41)),
        "quantize: expected groups as .* got other boundaries",
    ),
    "a table whose columns overlap": (
        lambda: mf.tensor.quantize(X, "mxfp8", columnwise=True, groups=bad_table(2, 1, 0)),
        "quantize: expected groups as .* got other boundaries",
    ),
    "a batch": (
        lambda: mf.tensor.quantize(X.expand(2, 40, 32), "mxfp8", groups=ROW_TABLE),
        r"quantize: expected x \(rows, cols\) with groups, got 3 dimensions",
    ),
    "a batch in amax": (
        lambda: mf.tensor.amax(X.expand(2, 40, 32), "nvfp4", groups=ROW_TABLE),
        r"amax: expected x \(rows, cols\) with groups, got 3 dimensions",
    ),
    "a batch in hadamard": (
        lambda: mf.tensor.hadamard(X.expand(2, 40, 32), groups=ROW_TABLE),
        r"hadamard: expected x \(rows, cols\) with groups, got 3 dimensions",
    ),
    "row_ids of another length": (
        lambda: mf.tensor.quantize(X, "mxfp8", groups=ROW_TABLE, row_ids=int32([1, 2])),
        r"quantize: expected row_ids with groups, as int32 \(40\), got Int \[2\]",
    ),
    "row_ids of int64": (
        lambda: mf.tensor.quantize(X, "mxfp8", groups=ROW_TABLE, row_ids=torch.arange(40)),
        r"quantize: expected row_ids with groups, as int32 \(40\), got Long \[40\]",
    ),
    "row_ids without groups": (
        lambda: mf.tensor.quantize(X, "mxfp8", row_ids=torch.arange(40).int()),
        "quantize: expected row_ids with groups, .* without groups",
    ),
    "row_ids on meta": (
        lambda: mf.tensor.quantize(
            X, "mxfp8", groups=ROW_TABLE, row_ids=torch.arange(40, device="meta").int()
        ),
        "row_ids",
    ),
    "a unit of 24": (
        lambda: mf.tensor.quantize(X, "mxfp8", groups=ROW_TABLE, group_unit=24),
        "quantize: expected group_unit 0, 16, 32, 64 or 128, got 24",
    ),
    "a unit without groups": (
        lambda: mf.tensor.quantize(X, "mxfp8", group_unit=32),
        "quantize: expected group_unit 0 without groups, got 32",
    ),
    "a unit without groups in hadamard": (
        lambda: mf.tensor.hadamard(X, group_unit=32),
        "hadamard: expected group_unit 0 without groups, got 32",
    ),
    "a unit below the block": (
        lambda: ops.dequantize(
            GROUPED.codes, GROUPED.scale, GROUPED.amax, "mxfp8", GROUPED.shape[1],
            groups=ROW_TABLE, group_unit=16,
        ),
        "dequantize: expected columns in units of .* multiple of 32",
    ),
    "fewer columns than the groups take": (
        lambda: ops.dequantize(
            GROUPED.codes[:, :64].contiguous(), GROUPED.scale[:, :2].contiguous(), GROUPED.amax,
            "mxfp8", 64, groups=mf.tensor.group_table(int32([33, 40]), 40), group_unit=32,
        ),
        "dequantize: expected groups as .*, with the last end at most 64, got the end 96",
    ),
    "a first expert without groups": (
        lambda: mf.tensor.quantize(X, "mxfp8", first_expert=1),
        "quantize: expected first_expert of groups or a batch, 0 or more, got 1",
    ),
    "a negative first expert": (
        lambda: mf.tensor.quantize(X, "mxfp8", groups=ROW_TABLE, first_expert=-1),
        "quantize: expected first_expert of groups or a batch, 0 or more, got -1",
    ),
    "one amax for all groups": (
        lambda: mf.tensor.quantize(X, "nvfp4", groups=ROW_TABLE, amax=torch.tensor(1.0)),
        r"quantize: expected amax as float32 \[2\], got Float \[\]",
    ),
    "a product": (
        lambda: mf.tensor.scaled_mm(GROUPED, GROUPED),
        "scaled_mm: expected a without groups, got a grouped operand",
    ),
    "a unit below the block's": (
        lambda: ops.scaled_mm(
            *COLUMNS[:3], *COLUMNS[:3], "e4m3/1x128*e4m3/1x128", k=40, groups=ROW_TABLE,
            group_unit=64,
        ),
        "scaled_mm: expected group_unit as a multiple of 128 under e4m3/1x128, got 64",
    ),
    "a weight": (
        lambda: mf.QuantizedTensor(
            mf.tensor.quantize(X, "mxfp8", groups=ROW_TABLE), None, dtype=torch.float32
        ),
        "expected a matrix without groups, got a grouped operand",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input(name):
    call, message = BAD_CALLS[name]
    with pytest.raises(ValueError, match=message):
        call()


class Dispatched(TorchDispatchMode):
    """Calls every op by the dispatcher."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


@contextmanager
def checked_groups():
    assert mf.tensor.check_groups(True) is False
    try:
        yield
    finally:
        assert mf.tensor.check_groups(False) is True


def test_check_groups_names_the_op_and_the_group():
    legal = int32([0, 8, 8, 40])
    with checked_groups():
        assert torch.equal(mf.tensor.group_table(legal, 40), ops.group_table(legal, 40))
        for ends, message in (
            ([0, 8, 7, 40], "group_table: .* 0 to 40 at most, got 7 for group 2 after 8"),
            ([-1, 8], "group_table: .* got -1 for group 0 after 0"),
            ([8, 41], "group_table: .* got 41 for group 1 after 8"),
        ):
            with pytest.raises(ValueError, match=message):
                mf.tensor.group_table(int32(ends), 40)
        b = torch.ones(3, 32, 16)
        for dispatch in (nullcontext(), Dispatched()):
            with (
                dispatch,
                pytest.raises(ValueError, match=r"scaled_grouped_mm: .* got 7 for group 1"),
            ):
                mf.functional.scaled_grouped_mm(X, b, int32([8, 7, 40]), "mxfp8")
    assert mf.tensor.group_table(int32([8, 41]), 40)[0].tolist() == [0, 8, 40]
    with pytest.raises(TypeError, match="check_groups: enabled: expected True or False, got 1"):
        mf.tensor.check_groups(1)


def test_products_without_groups_or_rows():
    """A product with no group, or of no rows, has no element that an engine computes."""
    for recipe in ("bf16", "fp8_rowwise", "fp8_blockwise", "mxfp4", "nvfp4"):
        for rows, count in ((0, 0), (5, 0), (0, 3)):
            x = torch.ones(rows, 32, dtype=torch.bfloat16, requires_grad=True)
            experts = torch.ones(count, 16, 32, dtype=torch.bfloat16, requires_grad=True)
            rng = torch.tensor([1, 2])
            offs = torch.zeros(count, dtype=torch.int32)
            y = mf.functional.scaled_grouped_mm(x, experts.transpose(-2, -1), offs, recipe, rng=rng)
            assert y.shape == (rows, 16)
            assert not y.any()
            y.sum().backward()
            assert x.grad is not None
            assert not x.grad.any()
            assert experts.grad is not None
            assert experts.grad.shape == (count, 16, 32)
            assert not experts.grad.any()
