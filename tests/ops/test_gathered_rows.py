"""rows_from: casts of the rows that an index names."""

from __future__ import annotations

import pytest
import torch
from minifloat._native import ops
from torch import Tensor


def table_of(*ends: int, rows: int) -> Tensor:
    return ops.group_table(torch.tensor(ends, dtype=torch.int32), rows)


X = torch.randn(9, 48, generator=torch.Generator().manual_seed(0))
FROM = torch.tensor([3, 3, 8, 0, 1, 7, 2], dtype=torch.int32)


@pytest.mark.parametrize(
    ("spec", "line"),  # line: of the table, for the spec's unit
    [("e4m3/tensor", 1), ("e4m3/row", 1), ("mxfp8", 2), ("nvfp4+rht", 2), ("e4m3/1x128", 4)],
)
def test_equals_gathering_first(spec: str, line: int) -> None:
    groups = table_of(2, 2, 7, rows=7)
    want = ops.quantize(X[FROM.long()], spec, spec, groups=groups)
    got = ops.quantize(X, spec, spec, groups=groups, rows_from=FROM)
    for a, b in zip(got[:3], want[:3]):
        assert torch.equal(a, b)
    in_groups = int(groups[line, -1]) // (2 if "fp4" in spec else 1)
    assert got[4].shape == want[4].shape
    assert torch.equal(got[4][:, :in_groups], want[4][:, :in_groups])
    assert torch.equal(got[6], want[6])


def test_amax_equals_gathering_first() -> None:
    groups = table_of(2, 2, 7, rows=7)
    rng = torch.tensor([1, 2])
    for spec in ("e4m3/tensor", "e4m3/row", "nvfp4+rht", "nvfp4+eden"):
        for columnwise in (False, True):
            want = ops.amax(X[FROM.long()], spec, columnwise, groups=groups, rng=rng)
            got = ops.amax(X, spec, columnwise, groups=groups, rows_from=FROM, rng=rng)
            assert torch.equal(got, want)


def test_rows_past_the_last_group_come_from_anywhere() -> None:
    index = torch.cat([FROM, torch.tensor([99, -1], dtype=torch.int32)])
    groups = table_of(7, rows=9)
    got = ops.quantize(X, "mxfp8", "", groups=groups, rows_from=index)
    assert got[0].shape == (9, 48)
    assert torch.equal(got[0][:7], ops.quantize(X[FROM.long()], "mxfp8", "")[0])


def test_errors() -> None:
    groups = table_of(7, rows=7)
    with pytest.raises(ValueError, match="expected no rows_from without groups"):
        ops.quantize(X, "mxfp8", "", rows_from=FROM)
    with pytest.raises(ValueError, match=r"expected rows_from as int32 \(rows\), got Long"):
        ops.quantize(X, "mxfp8", "", groups=groups, rows_from=FROM.long())
    bad = FROM.clone()
    bad[4] = 9
    with pytest.raises(ValueError, match="expected rows_from of 0 to 8, got 9 at 4"):
        ops.quantize(X, "mxfp8", "", groups=groups, rows_from=bad)


def test_operands_of_a_layer() -> None:
    groups = table_of(2, 2, 7, rows=7)
    for recipe in ("fp8_rowwise", "mxfp8", "nvfp4_pow2"):
        want = ops.layer_operands(X[FROM.long()], recipe, "x", groups=groups)
        got = ops.layer_operands(X, recipe, "x", groups=groups, rows_from=FROM)
        assert all(a.shape == b.shape for a, b in zip(got, want, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(got[:4], want[:4]))
    with pytest.raises(ValueError, match="expected no rows_from without groups"):
        ops.layer_operands(X, "mxfp8", "x", rows_from=FROM)


def test_opcheck() -> None:
    groups = table_of(2, 2, 7, rows=7)
    torch.library.opcheck(
        ops.amax.default, (X, "e4m3/row", True), {"groups": groups, "rows_from": FROM}
    )
