"""SwiGLU and the copies between tokens and rows on the GPU: the CPU's bytes.

`-k quick` is the subset for compute-sanitizer.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from minifloat._native import ops
from torch import Tensor

from tests.gpu.sweep import DTYPES, describe, laid_out, on, values
from tests.support.same_bits import on_cpu, require_same_bytes
from tests.support.swiglu_casts import ENDS as SWIGLU_ENDS
from tests.support.swiglu_casts import Case, draw, require_same_cast

pytestmark = pytest.mark.gpu

# Widths around a vector of 8 columns and around the 256 of a warp, and a layer's.
WIDTHS = [1, 7, 8, 9, 64, 255, 256, 257, 264, 768, 2048]
ROWS = [0, 1, 7, 8, 33]
KINDS = ["normal", "wide", "tiny", "huge", "special"]
FORMS: list[dict[str, Any]] = [{}, {"limit": 1.0, "alpha": 1.702}, {"limit": 7.0, "alpha": 1.0}]
LAYOUTS = ["dense", "odd base", "odd pitch", "padded rows"]


def matrix(kind: str, rows: int, cols: int, dtype: torch.dtype, seed: int, layout: str) -> Tensor:
    x = values(kind, (rows, cols), dtype, seed)
    return x if layout == "dense" else laid_out(x[None], layout)[0]


def compare(
    device: torch.device,
    kind: str,
    rows: int,
    width: int,
    dtype: torch.dtype,
    layout: str,
    form: dict[str, Any],
    parts: str,
    in_groups: bool,
) -> None:
    """Compares both ops.   parts: "two" products, or one, "apart" or "interleaved"."""
    across = width if parts == "two" else 2 * width
    product = matrix(kind, rows, across, dtype, 1, layout)
    other = matrix(kind, rows, width, dtype, 2, layout) if parts == "two" else None
    dh = matrix("normal", rows, width, dtype, 3, layout)
    weights = torch.rand(rows, generator=torch.Generator().manual_seed(4))
    options: dict[str, Any] = {**form, "interleaved": parts == "interleaved"}
    there: dict[str, Any] = dict(options)
    if in_groups:
        ends = torch.tensor([rows // 3, rows // 3, rows - rows // 4], dtype=torch.int32)
        pairs = torch.randperm(rows, generator=torch.Generator().manual_seed(5)).int()
        for given, where in ((options, torch.device("cpu")), (there, device)):
            given["groups"] = ops.group_table(ends.to(where), rows)
            given["pairs"] = pairs.to(where)
    tensors = [dh, product, other, weights]
    moved = [None if t is None else on(device, t) for t in tensors]
    what = f"{kind} {describe(product)} {layout} {parts} {form} groups={in_groups}"
    want = ops.swiglu(product, other, weights, **options)
    require_same_bytes(ops.swiglu(*moved[1:], **there), want, f"swiglu {what}")
    compare_gradients(tensors, moved, options, there, what)


def compare_gradients(
    tensors: list[Any],
    moved: list[Any],
    options: dict[str, Any],
    there: dict[str, Any],
    what: str,
) -> None:
    """Compares swiglu_backward, and the amaxes of its results where rows lie in groups."""
    groups = options.get("groups")
    asked = {"amaxes": groups is not None}
    *wanted, lines = ops.swiglu_backward(*tensors, **options, **asked)
    *found, lines_there = ops.swiglu_backward(*moved, **there, **asked)
    found = on_cpu([*found, *lines_there])
    found, lines_there = found[:3], found[3:]
    for name, a, b in zip(("d_product", "d_other", "d_weights"), found, wanted, strict=True):
        require_same_bytes(a, b, f"{name} {what}")
    for a, b in zip(lines_there, lines, strict=True):
        end = int(groups[0, -1]) if a.dim() == 1 else a.shape[0]
        require_same_bytes(a[:end], b[:end], f"amaxes {what}")


@pytest.mark.parametrize("parts", ["two", "apart", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS, ids=["silu", "limit 1", "limit 7"])
def test_swiglu(device, form, dtype, parts):
    for kind, rows, width in itertools.product(KINDS, ROWS, WIDTHS):
        compare(device, kind, rows, width, dtype, "dense", form, parts, in_groups=rows == 33)


@pytest.mark.parametrize("parts", ["two", "apart", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_swiglu_of_any_layout(device, layout, dtype, parts):
    for rows, width in itertools.product((1, 9), (1, 8, 40, 257, 512)):
        compare(device, "normal", rows, width, dtype, layout, {}, parts, in_groups=False)


def test_swiglu_of_every_bfloat16(device):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gate, up = every.view(64, 1024), every.view(64, 1024).flip(0, 1).contiguous()
    ones = torch.ones(64)
    dh = torch.ones_like(gate)
    for form in FORMS:
        want = ops.swiglu(gate, up, ones, **form)
        moved = [t.to(device) for t in (gate, up, ones)]
        require_same_bytes(ops.swiglu(*moved, **form), want, f"swiglu {form}")
        tensors = [dh, gate, up, ones]
        compare_gradients(tensors, [t.to(device) for t in tensors], form, form, str(form))


def test_the_sigmoid_of_many_floats(device):
    """Every 4,099th float, and every one from -88 to -86 in steps of 2^-12."""
    spread = torch.arange(-(2**31), 2**31, 4099).to(torch.int32).view(torch.float32)
    near = torch.arange(-88, -86, 2.0**-12)
    gate = torch.cat([spread, near])
    gate = gate[: gate.numel() // 1024 * 1024].view(-1, 1024)
    ones, up = torch.ones(gate.shape[0]), torch.ones_like(gate)
    tensors = [up, gate, up, ones]
    moved = [t.to(device) for t in tensors]
    require_same_bytes(ops.swiglu(*moved[1:]), ops.swiglu(*tensors[1:]), "swiglu")
    compare_gradients(tensors, moved, {}, {}, "")


# The last widths are rows whose amaxes another kernel finds.
@pytest.mark.parametrize("width", [8, 48, 256, 264, 512, 768, 776, 1024, 1032, 2048])
@pytest.mark.parametrize("parts", ["two", "apart"])
def test_amaxes_of_swiglu_gradients(device, parts, width):
    sizes = torch.randint(0, 200, (64,), generator=torch.Generator().manual_seed(7))
    many = (sizes.cumsum(0).tolist(), int(sizes.sum()) + 300)
    for (offs, rows), has_pairs in itertools.product([*SWIGLU_ENDS[2:], many], (False, True)):
        case = draw(offs, rows, width, torch.bfloat16, parts, has_pairs=has_pairs, scale=3)
        dh = torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).bfloat16()
        dh[:: max(rows // 5, 1), width // 2] = float("nan")
        there = case.on(device)
        moved = [dh.to(device), there.product, there.other, there.weights]
        tensors = [dh, case.product, case.other, case.weights]
        compare_gradients(tensors, moved, case.form, there.form, f"{offs} {has_pairs}")


def test_amaxes_of_swiglu_gradients_of_every_bfloat16(device):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gate, up, dh = (t.view(256, 256) for t in (every, every.flip(0), every.roll(12345)))
    table = ops.group_table(torch.tensor([100, 256], dtype=torch.int32), 256)
    tensors = [dh, gate.contiguous(), up.contiguous(), torch.rand(256)]
    moved = [t.to(device) for t in tensors]
    there = {"groups": table.to(device)}
    compare_gradients(tensors, moved, {"groups": table}, there, "every bfloat16")


# ---- SwiGLU within its cast ----------------------------------------------------------------------

# Casts that kernels fuse: rowwise, columnwise, both; and some that are compositions on a GPU too.
FUSED: list[tuple[str, str]] = [
    ("e4m3/row", ""),
    ("e4m3/row+exact", ""),
    ("e4m3/1x128", ""),
    ("", "e4m3/1x128"),
    ("e4m3/1x128", "e4m3/1x128"),
    ("mxfp8", ""),
    ("", "mxfp8"),
    ("mxfp8", "mxfp8"),
    ("mxfp4", ""),
    ("mxfp4+sr", ""),
    ("", "mxfp4"),
    ("", "mxfp4+rht"),
    ("", "mxfp4+sr+rht"),
    ("mxfp4", "mxfp4+rht"),
    ("e4m3/tensor+delayed", ""),
    ("", "e4m3/tensor+delayed"),
    ("e4m3/tensor+delayed", "e4m3/tensor+delayed"),
]
COMPOSED = [("", "e4m3/row"), ("nvfp4", "nvfp4+rht"), ("e4m3/tensor", ""), ("", "e5m2/tensor")]


def compare_casts(device: torch.device, case: Case, row: str, col: str, **options: Any) -> None:
    options |= {"stream_row": 1234567890123, "stream_col": -42}
    table, rows = case.form["groups"], case.product.shape[0]
    if "+sr" in row + col:
        options["rng"] = torch.tensor([-(2**61) + 3, 9])
        if table is not None and row:
            options["row_ids"] = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
            options["row_ids"] = options["row_ids"].int()
    for side, spec in (("row", row), ("col", col)):
        if "+delayed" in spec:
            amax = torch.tensor(1.75) if table is None else torch.rand(table.shape[1] - 1) + 0.5
            options[f"amax_{side}"] = amax
    there = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    want = case.composition(row, col, **options)
    require_same_cast(case, case.on(device).cast(row, col, **there), want, row, col)


@pytest.mark.parametrize("parts", ["two", "apart", "interleaved"])
@pytest.mark.parametrize(("row", "col"), [*FUSED, *COMPOSED])
def test_casts_of_swiglu(device, row, col, parts):
    for (offs, rows), width in itertools.product(SWIGLU_ENDS, (128, 256, 640)):
        for form in FORMS[:2]:
            for has_pairs in (False, True):
                case = draw(
                    offs, rows, width, torch.bfloat16, parts, has_pairs=has_pairs, scale=3, **form
                )
                compare_casts(device, case, row, col)
    for decoded in (True, False):
        case = draw([60, 60, 200], 230, 256, torch.bfloat16, parts)
        asked = {"decoded_row": decoded and bool(row), "decoded_col": decoded and bool(col)}
        compare_casts(device, case, row, col, **asked)


@pytest.mark.parametrize("width", [1, 8, 16, 48, 96, 144, 2048, 2064, 4096, 14336])
@pytest.mark.parametrize("dtype", DTYPES)
def test_casts_of_swiglu_of_any_width(device, dtype, width):
    pairs = [("e4m3/row", ""), ("mxfp8", ""), ("", "mxfp8"), ("e4m3/1x128", "e4m3/1x128")]
    for (offs, rows), (row, col) in itertools.product(SWIGLU_ENDS[:5], pairs):
        compare_casts(device, draw(offs, rows, width, dtype, "apart"), row, col)


def test_casts_of_swiglu_of_special_values(device):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for (row, col), form in itertools.product(FUSED, FORMS):
        case = draw([100, 256], 256, 256, torch.bfloat16, "two", **form)
        special = Case(every.view(256, 256), every.flip(0).view(256, 256), case.weights, case.form)
        compare_casts(device, special, row, col)


def test_casts_of_swiglu_with_many_groups(device):
    sizes = torch.randint(0, 200, (128,), generator=torch.Generator().manual_seed(7))
    ends = sizes.cumsum(0)
    for row, col in FUSED:
        case = draw(ends.tolist(), int(ends[-1]) + 100, 768, torch.bfloat16, "apart")
        compare_casts(device, case, row, col)


# The last widths are rows that a warp does not hold.
@pytest.mark.parametrize("width", [16, 48, 144, 512, 768, 1024, 2048, 2064])
@pytest.mark.parametrize("parts", ["two", "interleaved"])
def test_amaxes_of_columns_of_swiglu(device, parts, width):
    for offs, rows in SWIGLU_ENDS:
        case = draw(offs, rows, width, torch.bfloat16, parts, scale=3)
        for spec in ("e4m3/row", "e4m3/row+exact"):
            compare_casts(device, case, spec, "", amaxes_of_columns=True)
            found = case.composition(spec, "", amaxes_of_columns=True)[6]
            compare_casts(device, case, "", spec, amax_col=found)


# ---- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_take_rows(device, slots, dtype):
    for tokens, cols in itertools.product((1, 2, 40), (1, 3, 8, 16, 128, 1024, 2048, 2056, 7168)):
        x = torch.randint(0, 200, (tokens, cols)).to(dtype)
        index = torch.randint(0, tokens * slots, (tokens * slots + 3,), dtype=torch.int32)
        floats = x.float()[None], x.bfloat16()[None]
        odd = laid_out(floats[0], "odd pitch")[0], laid_out(floats[1], "odd base")[0]
        for source in (x, *odd):
            got = ops.take_rows(on(device, source), index.to(device), slots)
            require_same_bytes(
                got, ops.take_rows(source, index, slots), f"take_rows {describe(source)}"
            )
            order = torch.randperm(tokens * slots).int()
            places = order.argsort().view(tokens, slots).int().to(device)
            got = ops.take_rows(on(device, source), order.to(device), slots, places=places)
            require_same_bytes(got, source[order.long() // slots], f"by places {describe(source)}")
    scales = torch.rand(40)
    index = torch.randint(0, 40, (90,), dtype=torch.int32)
    require_same_bytes(
        ops.take_rows(scales.to(device), index.to(device)), scales[index.long()], "scales"
    )


@pytest.mark.parametrize("columns", [1, 3, 16, 64, 1000, 2048, 7168])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_pack_rows(device, dtype, columns):
    for tokens, slots in itertools.product((1, 7, 300), (1, 3, 8)):
        rows = tokens * slots
        index = torch.randperm(rows).int()
        fields = [
            torch.randint(0, 200, (tokens, columns)).to(dtype),
            torch.randint(0, 200, (rows, columns + 2))[:, 1:-1].to(dtype),  # of an odd pitch
            torch.rand(rows),
            torch.randint(0, 200, (rows, 5), dtype=torch.uint8),
            index,
        ]
        given = [on(device, field) for field in fields]
        chosen = torch.randint(-1, rows, (rows + 3,), dtype=torch.int32)
        for rows_from in (None, chosen):
            want = ops.pack_rows(fields, index, slots=[slots, 0, 1, 1, 0], rows_from=rows_from)
            numbers = None if rows_from is None else rows_from.to(device)
            got = ops.pack_rows(
                given, index.to(device), slots=[slots, 0, 1, 1, 0], rows_from=numbers
            )
            require_same_bytes(
                got, want, f"{dtype}, {columns} columns, {tokens} tokens, {slots} slots"
            )


def test_numbers_out_of_range_on_the_device(cuda):
    """A GPU's numbers are not copied to the host: rows out of range are zeros."""
    x, index = torch.ones(4, 24, device=cuda), torch.tensor([3, 4, -1, 2**31 - 1, 0]).int()
    assert ops.take_rows(x, index.to(cuda))[:, 0].tolist() == [1, 0, 0, 0, 1]
    packed = ops.pack_rows([x], index.to(cuda), slots=[1]).view(torch.float32)
    assert packed[:, 0].tolist() == [1, 0, 0, 0, 1]
    assert ops.pack_rows([x], rows_from=index.to(cuda)).any(dim=1).tolist() == [1, 0, 0, 0, 1]
    inverse = torch.tensor([[1], [2], [3], [0]], dtype=torch.int32, device=cuda)
    by_places = ops.take_rows(x, index[:4].to(cuda), places=inverse)
    assert by_places[:, 0].tolist() == [1, 0, 0, 0]
    places = index[:4].view(2, 2).to(cuda)
    assert ops.add_slots(x, places)[:, 0].tolist() == [1, 0]
    ones = torch.ones(4, device=cuda)
    h = ops.swiglu(x, None, ones, pairs=index[:4].to(cuda))
    assert h.any(dim=1).tolist() == [True, False, False, False]


def test_the_gradient_of_a_weight_of_no_row_is_zero(cuda):
    gate, up, dh = torch.randn(3, 64, 8, device=cuda)
    pairs = torch.full((64,), 64, dtype=torch.int32)  # out of range, except
    pairs[:4] = torch.tensor([5, 0, 63, 9])
    ones, pairs = torch.ones(64, device=cuda), pairs.to(cuda)
    freed = torch.full((64,), float("nan"), device=cuda)
    del freed
    d_weights = ops.swiglu_backward(dh, gate, up, ones, pairs=pairs)[2]
    assert d_weights.nonzero().flatten().tolist() == [0, 5, 9, 63]


@pytest.mark.parametrize("slots", [1, 3, 40])
def test_take_rows_by_places_that_are_no_inverse(device, slots):
    """The result is the index's: of rows that no place names, and of places named twice."""
    for tokens, cols, seed in itertools.product((1, 9), (3, 8, 2056), range(3)):
        torch.manual_seed(seed)
        rows = tokens * slots
        x = torch.randn(tokens, cols).bfloat16()
        order = torch.randperm(rows).int()
        index = torch.where(torch.rand(rows) < 0.7, order, torch.randint(0, rows, (rows,)).int())
        drawn = torch.randint(-1, rows + 1, (rows,))
        places = torch.where(torch.rand(rows) < 0.7, order.argsort(), drawn).int()
        places = places.view(tokens, slots)
        want = x[index.long() // slots]
        got = ops.take_rows(x.to(device), index.to(device), slots, places=places.to(device))
        require_same_bytes(got, want, f"take_rows {tokens} {slots} {cols}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [0, 1, 2, 3, 5, 8])
def test_add_slots(device, slots, dtype):
    for kind, tokens, cols in itertools.product(KINDS, (0, 1, 33), (1, 8, 9, 256, 264, 2048)):
        rows = values(kind, (tokens * slots + 2, cols), dtype, 1)
        places = torch.randint(0, rows.shape[0], (tokens, slots), dtype=torch.int32)
        for base in (None, torch.randn(tokens, cols)):
            want = ops.add_slots(rows, places, base)
            there = None if base is None else base.to(device)
            got = ops.add_slots(rows.to(device), places.to(device), there)
            require_same_bytes(
                got, want, f"add_slots {kind} {describe(rows)} base={base is not None}"
            )
    rows = laid_out(torch.randn(1, 9, 72).to(dtype), "odd pitch")[0]
    places = torch.randint(0, 9, (4, slots), dtype=torch.int32)
    got = ops.add_slots(on(device, rows), places.to(device))
    require_same_bytes(got, ops.add_slots(rows, places), "add_slots of an odd pitch")


def test_quick(device):
    for parts, dtype in itertools.product(("two", "apart", "interleaved"), DTYPES):
        for width in (9, 264):
            compare(device, "special", 9, width, dtype, "dense", FORMS[1], parts, in_groups=True)
            compare(device, "normal", 3, width, dtype, "odd pitch", {}, parts, in_groups=False)
    for row, col in FUSED:
        compare_casts(device, draw([9, 9, 140], 150, 128, torch.bfloat16, "apart"), row, col)
    x, index = torch.randn(9, 40), torch.arange(18).flip(0).int()
    require_same_bytes(
        ops.take_rows(x.to(device), index.to(device), 2), ops.take_rows(x, index, 2), "take_rows"
    )
    places = index[:8].view(4, 2) // 2
    require_same_bytes(
        ops.add_slots(x.to(device), places.to(device)), ops.add_slots(x, places), "add_slots"
    )
