"""Golden cases of casts: mf.tensor.quantize and what reads its codes, of every spec.

A line is a spec, a direction and a dtype. Its digest folds codes, scales and amaxes of all shapes
and kinds of values. "both" casts two directions from one read, as QuantizedTensor.from_tensor does.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import minifloat as mf
import torch
from minifloat.spec import Spec
from torch import Tensor

from tests.golden import tables
from tests.golden.inputs import KINDS, any_bytes, digest, hashed, values

Case = tuple[str, str]  # a name, and what its line has after it

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DIRECTIONS = {"row": False, "col": True}
SHAPES = ((1, 1), (17, 33), (33, 130), (2, 20, 40), (130, 257))  # ragged
WHOLE = (128, 256)  # tiles of every kernel
BITS = (0x3FC00000, 1, 0, 0x00400000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x0B000000, 0x45A80000)
SEED, STREAM = -(2**62) + 12345, 1234567890123456789
ENDS = ((0, 37, 37, 100), (16, 16, 64, 96))  # of groups of 100 rows: empty ones, and rows past all


def parts(q: mf.tensor.Quantized) -> list[Tensor]:
    return [q.codes, q.scale, q.amax]


def random_bits(spec: str) -> dict[str, int]:
    return {"seed": SEED, "stream": STREAM} if Spec.parse(spec).is_stochastic else {}


def cases(device: torch.device) -> Iterator[Case]:
    yield from quantize(device)
    yield from both(device)
    yield from given_amaxes(device)
    yield from positions(device)
    yield from amaxes(device)
    yield from dequantize(device)
    yield from groups(device)
    yield from transforms(device)


def quantize(device: torch.device) -> Iterator[Case]:
    inputs = {
        name: [
            *(values("bell", s, dtype, i).to(device) for i, s in enumerate((*SHAPES, WHOLE))),
            *(values(kind, (33, 130), dtype, 9).to(device) for kind in KINDS[1:]),
            values("edges", WHOLE, dtype, 10).to(device),
            values("bell", (20, 48), dtype, 11).to(device)[:, 3:36],  # rows that lie apart
        ]
        for name, dtype in DTYPES.items()
    }
    for spec, (side, columnwise) in product(tables.specs(), DIRECTIONS.items()):
        for name, data in inputs.items():
            found: list[Tensor] = []
            for x in data:
                q = mf.tensor.quantize(x, spec, columnwise=columnwise, **random_bits(spec))
                found += parts(q)
            yield f"quantize {spec} {side} {name}", digest(found)


def both(device: torch.device) -> Iterator[Case]:
    """Casts two directions of every plain spec, and the pairs of weights in presets."""
    plain = [s for s in tables.specs() if is_nearest(s)]
    pairs = {(s, s) for s in plain} | {(a, b) for a, b in zip(plain, plain[1:] + plain[:1])}
    for name in mf.presets():
        recipe = mf.Recipe(name)
        pair = recipe.fprop.b, recipe.dgrad.b
        if not any(Spec.parse(s).is_bf16 for s in pair) and all(map(is_nearest, pair)):
            pairs.add(pair)
    data = [values("bell", (33, 70), torch.bfloat16), values("edges", WHOLE, torch.bfloat16)]
    data = [x.to(device) for x in (*data, values("bell", (2, 40, 48), torch.float32, 3))]
    for row, col in sorted(pairs):
        found = []
        for x in data:
            w = mf.QuantizedTensor.from_tensor(x, row, col)
            assert w.rowwise is not None
            assert w.columnwise is not None
            found += [*parts(w.rowwise), *parts(w.columnwise)]
        yield f"both {row} {col}", digest(found)


def is_nearest(spec: str) -> bool:
    parsed = Spec.parse(spec)
    return not (parsed.is_stochastic or parsed.is_delayed)


def given_amaxes(device: torch.device) -> Iterator[Case]:
    """Casts by an amax that is passed: too small, too large, 0, denormal, Inf, NaN, S subnormal."""
    amaxes_ = torch.tensor(BITS, dtype=torch.int32).view(torch.float32).to(device)
    for spec, (side, columnwise) in product(tables.specs(), DIRECTIONS.items()):
        parsed = Spec.parse(spec)
        if not parsed.amax_of or parsed.transform not in (0, 16, 128):
            continue
        found = []
        for kind in ("bell", "rows"):
            x = values(kind, (len(BITS), 20, 33), torch.bfloat16, 4).to(device)
            amax = amaxes_
            if parsed.amax_of == "row":
                amax = amaxes_.view(-1, 1).expand(-1, 33 if columnwise else 20).contiguous()
            q = mf.tensor.quantize(x, spec, columnwise=columnwise, amax=amax, **random_bits(spec))
            found += parts(q)
        yield f"given {spec} {side}", digest(found)


def positions(device: torch.device) -> Iterator[Case]:
    """Casts under random bits: seeds, streams, origins, numbers of matrices in a batch."""
    x = values("bell", (2, 40, 150), torch.bfloat16, 5).to(device)
    for spec, (side, columnwise) in product(tables.specs(), DIRECTIONS.items()):
        if not Spec.parse(spec).is_stochastic:
            continue
        found = []
        for seed, stream, origin, first in (
            (0, 0, (0, 0), 0),
            (1, 0, (0, 0), 0),
            (0, 2, (0, 0), 0),
            (-5, -7, (256, 128), 0),
            (2**40, 2**35 + 3, (2**31, 2**31 + 2**30), 0),
            (3, 3, (0, 0), 5),
        ):
            q = mf.tensor.quantize(
                x,
                spec,
                columnwise=columnwise,
                seed=seed,
                stream=stream,
                origin=origin,
                first_expert=first,
            )
            found += parts(q)
        yield f"positions {spec} {side}", digest(found)


def amaxes(device: torch.device) -> Iterator[Case]:
    inputs = [
        values(kind, shape, dtype, 6).to(device)
        for kind, shape in product(("bell", "edges", "rows"), (*SHAPES, WHOLE))
        for dtype in DTYPES.values()
    ]
    for spec, (side, columnwise) in product(tables.specs(), DIRECTIONS.items()):
        parsed = Spec.parse(spec)
        if not parsed.amax_of or (parsed.is_stochastic and not parsed.draws_signs):
            continue
        given = {"seed": SEED, "stream": STREAM} if parsed.draws_signs else {}
        found = [mf.tensor.amax(x, spec, columnwise=columnwise, **given) for x in inputs]
        yield f"amax {spec} {side}", digest(found)


def dequantize(device: torch.device) -> Iterator[Case]:
    """Reads any codes under any scales, as fp32 and bf16."""
    for spec in tables.few_specs():
        parsed, found = Spec.parse(spec), []
        for i, (rows, cols) in enumerate(((17, 33), (33, 130), (64, 256))):
            codes = any_bytes((rows, parsed.sizes(rows, cols).code_cols), i)
            shape = parsed.scale_shape(rows, cols)
            scale = any_bytes((*shape, parsed.scale_dtype.itemsize), i + 9)
            scale = scale.view(parsed.scale_dtype).view(shape)
            amax = values("edges", (1, rows), torch.float32, i)[0].abs()
            amax = amax[1:2].view(()) if parsed.amax_of == "tensor" else amax
            amax = amax if parsed.amax_of else amax[:0]
            moved = (t.to(device) for t in (codes, scale, amax))
            q = mf.tensor.Quantized(*moved, spec, (rows, cols))
            found += [mf.tensor.dequantize(q, dtype) for dtype in DTYPES.values()]
        yield f"dequantize {spec}", digest(found)


# ---- groups of rows ------------------------------------------------------------------------------


def groups(device: torch.device) -> Iterator[Case]:
    """Casts and transforms groups: empty ones, unsorted row ids, a first expert, a larger unit."""
    x = values("bell", (100, 150), torch.bfloat16, 7).to(device)
    ids = ((hashed(100, 8) & 0xFFFF) * 100 + torch.arange(100)).int().to(device)
    dtypes = [x, values("edges", (100, 150), torch.float32, 8).to(device)]
    found = []
    for ends in ENDS:
        found.append(mf.tensor.group_table(torch.tensor(ends).int().to(device), 100))
    found.append(mf.tensor.group_table(torch.tensor([7, -3, 200, 5]).int().to(device), 100))
    yield "group_table", digest(found)
    for spec, (side, columnwise) in product(tables.few_specs(), DIRECTIONS.items()):
        parsed, found = Spec.parse(spec), []
        if parsed.block[0] > 1:
            continue
        for ends, unit, first, given in ((ENDS[0], 0, 0, None), (ENDS[1], 128, 3, ids)):
            table = mf.tensor.group_table(torch.tensor(ends).int().to(device), 100)
            more = {"groups": table, "first_expert": first, **random_bits(spec)}
            more |= {"group_unit": unit} if columnwise else {"row_ids": given}
            for data in dtypes:
                q = mf.tensor.quantize(data, spec, columnwise=columnwise, **more)
                found += of_groups(q, ends)
        yield f"groups {spec} {side}", digest(found)
        if parsed.amax_of and (parsed.draws_signs or not parsed.is_stochastic):
            key = {"seed": SEED, "stream": STREAM} if parsed.draws_signs else {}
            a = mf.tensor.amax(x, spec, columnwise=columnwise, groups=table, **key)
            is_of_rows = parsed.amax_of == "row" and not columnwise
            yield f"groups amax {spec} {side}", digest([a[: ends[-1]] if is_of_rows else a])


def of_groups(q: mf.tensor.Quantized, ends: tuple[int, ...]) -> list[Tensor]:
    """Returns codes, scales and amaxes of groups; other bytes are unspecified."""
    codes, scale, amax = parts(q)
    parsed, begins = Spec.parse(q.spec), (0, *ends)
    if not q.columnwise:
        is_of_rows = parsed.has_blocks or parsed.amax_of == "row"
        scale = scale[: ends[-1]] if is_of_rows else scale
        amax = amax[: ends[-1]] if parsed.amax_of == "row" else amax
        return [codes[: ends[-1]], scale, amax]
    unit = q.group_unit
    cols = sum(unit * max(1, -(-(end - begin) // unit)) for begin, end in zip(begins, ends))
    if parsed.has_blocks:
        scale = scale[..., : cols // parsed.block[1]]
    return [codes[:, : cols * parsed.code_bits // 8], scale, amax]


# ---- transforms ----------------------------------------------------------------------------------


def transforms(device: torch.device) -> Iterator[Case]:
    table = mf.tensor.group_table(torch.tensor(ENDS[0]).int().to(device), 100)
    points_of = sorted({Spec.parse(s).transform for s in tables.specs()} - {0})
    for points, (side, columnwise) in product(points_of, DIRECTIONS.items()):
        found = [
            mf.tensor.hadamard(
                values(kind, shape, dtype, 12).to(device), points, columnwise=columnwise
            )
            for kind, shape in product(("bell", "edges", "rows"), ((33, 130), (2, 20, 48), WHOLE))
            for dtype in DTYPES.values()
        ]
        x = values("bell", (100, 150), torch.bfloat16, 13).to(device)
        found.append(mf.tensor.hadamard(x, points, columnwise=columnwise, signs=0x1234))
        y = mf.tensor.hadamard(x, points, columnwise=columnwise, groups=table)
        cols = sum(points * max(1, -(-m // points)) for m in (0, 37, 0, 63))
        found.append(y[:, :cols] if columnwise else y)
        yield f"hadamard {points} {side}", digest(found)
    ends = {"m": (0, 100, 130), "k": (4, 4, 9)}
    for kind in ("", "m", "k"):
        offs = torch.tensor(ends[kind]).int().to(device) if kind else None
        scale = any_bytes((130, 9), 3).to(device)
        tiled = mf.tensor.swizzle_scales(scale, offs=offs, groups=kind)
        back = mf.tensor.unswizzle_scales(tiled, 130, 9, offs=offs, groups=kind)
        yield f"swizzle {kind or 'dense'}", digest([tiled, back])
    odd, even = any_bytes((33, 33), 4).to(device), any_bytes((2, 16, 24), 5).to(device)
    found = [mf.tensor.transpose_codes(odd, 65), mf.tensor.transpose_codes(even, 48)]
    yield "transpose_codes", digest(found)
