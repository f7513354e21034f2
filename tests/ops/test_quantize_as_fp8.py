"""quantize with fp8_row and fp8_col: the bytes of quantize, then fp4_as_fp8."""

import pytest
import torch
from minifloat._native import ops

from tests.support.same_bits import require_all_same, require_same_bytes

PAIRS = [
    ("nvfp4+pow2", ""),
    ("", "nvfp4+pow2+sr+rht"),
    ("nvfp4+pow2+sr", "nvfp4+pow2+sr+rht"),
    ("nvfp4/16x16+pow2", "nvfp4/16x16+pow2"),
    ("mxfp4", "mxfp4+rht"),
]
FORMS = [(True, True), (True, False), (False, True)]
RNG = torch.tensor([5, 6])


def converted(outputs, x, row, col, form, groups=None, unit=0):
    """Returns the eight tensors of quantize, those of FP4 that `form` names as FP8."""
    out = list(outputs)
    rows = x.shape[-2]
    if groups is not None:
        rows = -(-rows // unit) * unit + unit * (groups.shape[1] - 1)
    for side, spec, length in ((0, row, x.shape[-1]), (1, col, rows)):
        if not form[side] or not spec:
            continue
        codes, scale, amax = out[4 * side : 4 * side + 3]
        where = {} if groups is None else {"groups": groups, "group_unit": unit * side}
        out[4 * side : 4 * side + 2] = ops.fp4_as_fp8(codes, scale, amax, spec, length, **where)
    return out


def flags(row, col, form):
    return {"fp8_row": form[0] and bool(row), "fp8_col": form[1] and bool(col)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("row", "col"), PAIRS)
@pytest.mark.parametrize("shape", [(40, 72), (2, 33, 48), (1, 1), (0, 32), (32, 0)])
def test_bytes_are_those_of_two_steps(shape, row, col, form):
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.exp2(8 * torch.randn((*shape[:-1], 1)))
    x[..., ::3, :] = 0
    want = converted(ops.quantize(x, row, col, rng=RNG), x, row, col, form)
    got = ops.quantize(x, row, col, rng=RNG, **flags(row, col, form))
    require_all_same(got, want, compare=require_same_bytes)
    meta = ops.quantize(x.to("meta"), row, col, rng=RNG.to("meta"), **flags(row, col, form))
    assert [(t.shape, t.dtype) for t in meta] == [(t.shape, t.dtype) for t in want]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("row", "col"), [p for p in PAIRS if "16x16" not in p[0]])
def test_groups_take_two_steps_too(row, col, form):
    x, unit = torch.randn(70, 64), 32
    table = ops.group_table(torch.tensor([20, 20, 70], dtype=torch.int32), 70)
    where = {"rng": RNG, "groups": table, "group_unit": unit}
    want = converted(ops.quantize(x, row, col, **where), x, row, col, form, table, unit)
    got = ops.quantize(x, row, col, **where, **flags(row, col, form))
    used, length = int(table[2, -1]), 96 + 3 * unit  # columns past the last group are not written
    for a, b in zip(got, want, strict=True):
        is_columnwise = a.dim() == 2 and a.shape[0] == 64
        end = a.shape[1] * used // length if is_columnwise else None
        require_same_bytes(a[:, :end] if is_columnwise else a, b[:, :end] if is_columnwise else b)


@pytest.mark.parametrize("spec", ["nvfp4", "mxfp8", "e4m3/tensor", "nvfp4+4over6"])
def test_other_specs_raise(spec):
    for device in ("cpu", "meta"):
        x = torch.ones(4, 32, device=device)
        with pytest.raises(ValueError, match="powers of two"):
            ops.quantize(x, spec, "", fp8_row=True)
        with pytest.raises(ValueError, match="no spec"):
            ops.quantize(x, "mxfp4", "", fp8_col=True)
        with pytest.raises(ValueError, match="got both"):
            ops.quantize(x, "mxfp4", "", fp8_row=True, decoded_row=True)
