"""Specs, values, memory layouts and comparisons of the byte tests.

want = quantize(x)            on the CPU
got  = quantize(x on device)  the same bytes, output by output
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from minifloat._native import ops
from torch import Tensor

from tests.support.same_bits import on_cpu, require_same
from tests.support.specs import BASES, EDEN_RECIPE, has_bf16_values

ROUNDINGS = ["", "+sr"]
TRANSFORMS = ["", "+rht", "+rht32", "+rht64", "+rht128"]
SPECS = [base + r + t for base in BASES for r in ROUNDINGS for t in TRANSFORMS]
SPECS += ["nvfp4+eden"]  # takes no more flags
DTYPES = [torch.bfloat16, torch.float32]
DIRECTIONS = [(True, False), (False, True), (True, True)]  # rowwise, columnwise, both

SHAPES = [
    (1, 1), (1, 15), (15, 1), (15, 17), (16, 16), (17, 15), (17, 130), (31, 33), (32, 32), (33, 31),
    (33, 129), (64, 64), (127, 129), (128, 128), (129, 127), (128, 256), (131, 257), (1, 1000),
    (1000, 1), (7, 1000), (1000, 9), (257, 511), (3, 40, 70), (2, 128, 64), (5, 17, 16),
]  # fmt: skip
LARGE = [(1000, 1000), (1024, 2048), (2050, 1030)]
EMPTY = [(0, 16), (16, 0), (0, 0), (0, 4, 16), (2, 0, 32), (2, 32, 0)]

RNG = (-(2**62) + 12345, 7)  # seed, forward count
MODULE_STREAM = -987654321
STREAMS = {"stream_row": 1234567890123456789, "stream_col": -42}

PARTS = ["codes", "scale", "amax", "decoded"]
OUTPUTS = [f"{part}_{side}" for side in ("row", "col") for part in PARTS]


# ---- Values --------------------------------------------------------------------------------------

SPECIALS = [
    0.0,
    -0.0,
    float("inf"),
    -float("inf"),
    float("nan"),
    1e-40,
    -1e-45,
    3.39e38,
    448.0,
    6.0,
]


@lru_cache(maxsize=512)
def values(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Makes test data on the CPU.

    normal    standard normal          tiny      most of it denormal
    wide      times 2^-60 to 2^60      huge      up to the largest floats
    sparse    mostly whole zero blocks zeros     -0 everywhere
    special   zeros, infinities, NaN, denormals and the largest floats among normal numbers
    rare      one such number in 500, so that most blocks are finite
    """
    g = torch.Generator().manual_seed(seed + 1000 * len(shape))
    x = torch.randn(shape, generator=g)
    uniform = torch.rand(shape, generator=g)
    if kind == "wide":
        x = x * torch.exp2(120 * uniform - 60)
    elif kind == "tiny":
        x = x * 2.0**-130
    elif kind == "huge":
        x = (x * 2.0**126).clamp(-3.38e38, 3.38e38)
    elif kind == "sparse":
        x = torch.where(uniform < 0.01, x, 0.0)
    elif kind == "zeros":
        x = torch.full(shape, -0.0)
    elif kind in ("special", "rare"):
        pool = torch.tensor(SPECIALS)
        picks = pool[torch.randint(len(pool), shape, generator=g)]
        x = torch.where(uniform < (0.02 if kind == "special" else 0.002), picks, x)
    elif kind != "normal":
        raise ValueError(f"values: unknown kind {kind!r}")
    return x.to(dtype)


def magnitudes(dtype: torch.dtype) -> Tensor:
    """Makes (exponents, 1, 33): matrices of one magnitude each, smallest float to largest."""
    steps = torch.arange(33)
    signs = torch.where(steps % 2 == 1, 1.0, -1.0).double()
    exponents = torch.arange(-149, 128, 3).double().view(-1, 1, 1)
    return (torch.exp2(exponents) * signs * (1 + steps.double() / 40)).float().to(dtype)


# ---- Memory --------------------------------------------------------------------------------------

LAYOUTS = ["odd base", "odd pitch", "padded rows", "gaps in the batch", "repeated matrix"]


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Copies x (batch, rows, cols) to a view that an op must accept without a copy."""
    batch, rows, cols = x.shape
    if layout == "odd base":  # starts at an odd element
        flat = x.new_full((x.numel() + 1,), float("nan"))
        flat[1:] = x.flatten()
        return flat[1:].view(x.shape)
    if layout == "odd pitch":  # every row starts elsewhere within 16 bytes
        wide = x.new_full((batch, rows, cols + 5 + cols % 2), float("nan"))
        wide[..., 3 : 3 + cols] = x
        return wide[..., 3 : 3 + cols]
    if layout == "padded rows":  # aligned, with foreign values between the rows
        wide = x.new_full((batch, rows, (cols + 31) // 16 * 16), float("nan"))
        wide[..., :cols] = x
        return wide[..., :cols]
    if layout == "gaps in the batch":
        tall = x.new_full((batch, rows + 3, cols), float("nan"))
        tall[:, 2 : 2 + rows] = x
        return tall[:, 2 : 2 + rows]
    if layout == "repeated matrix":  # batch stride 0
        return x[:1].clone().expand(x.shape)
    raise ValueError(f"laid_out: unknown layout {layout!r}")


def on(device: torch.device, x: Tensor) -> Tensor:
    """Copies x to the device, with the same offset and strides within its storage."""
    if x.device == device:
        return x
    base = x if x._base is None else x._base
    return base.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


# ---- Comparison ----------------------------------------------------------------------------------


def describe(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {'x'.join(map(str, x.shape))}"


def is_stochastic(spec: str) -> bool:
    return not {"sr", "eden"}.isdisjoint(spec.split("+"))


def random_operand(spec: str, shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draws codes, scales and amaxes of an operand read as `shape`: any bits, any fp32."""
    g = torch.Generator().manual_seed(seed)
    rng = rng_tensor() if is_stochastic(spec) else None
    codes, scale, amax, *_ = ops.quantize(torch.zeros(shape), spec, "", rng=rng)
    codes = torch.randint(256, codes.shape, generator=g, dtype=torch.uint8)
    if scale.dtype == torch.float32:
        scale = values("special", tuple(scale.shape), torch.float32, seed)
    else:
        scale = torch.randint(256, scale.shape, generator=g, dtype=torch.uint8)
    return codes, scale, torch.rand(amax.shape, generator=g) + 0.5


def rng_tensor(size: int = 2) -> Tensor:
    return torch.tensor([*RNG, MODULE_STREAM][:size], dtype=torch.int64)


def require_same_quantize(
    device: torch.device,
    x: Tensor,
    row: str,
    col: str,
    *,
    rng_size: int = 2,
    note: str = "",
    **arguments: Any,
) -> None:
    """Compares quantize on the device with the CPU, all eight outputs. x is on either."""
    arguments = {**STREAMS, **arguments}
    for side, spec in (("decoded_row", row), ("decoded_col", col)):
        arguments[side] = arguments.get(side, False) and has_bf16_values(spec)
    if is_stochastic(row) or is_stochastic(col):
        arguments["rng"] = rng_tensor(rng_size)
    want = ops.quantize(x.cpu(), row, col, **arguments)
    there = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    got = on_cpu(ops.quantize(on(device, x), row, col, **there))
    for name, a, b in zip(OUTPUTS, got, want):
        require_same(a, b, f"'{row}', '{col}' of {describe(x)}{note}: {name}")


def require_same_op(
    device: torch.device, op: Any, args: Sequence[Any], note: str = "", **kw: Any
) -> None:
    """Compares an op of one output on the device with the CPU."""
    move = lambda v: on(device, v) if isinstance(v, Tensor) else v  # noqa: E731
    want = op(*args, **kw)
    got = op(*(move(v) for v in args), **{k: move(v) for k, v in kw.items()})
    texts = [describe(v) if isinstance(v, Tensor) else str(v) for v in args]
    require_same(got, want, f"{op._qualified_op_name}({', '.join(texts)}){note}")


def each_direction(spec: str) -> Iterator[tuple[str, str]]:
    for row, col in DIRECTIONS:
        yield spec if row else "", spec if col else ""


def recipe_pairs() -> list[tuple[str, str]]:
    """Lists the specs of the two directions of x, W and g in every preset, and under MS-EDEN."""
    import minifloat as mf

    def cast(text: str) -> str:
        return "" if text == "bf16" or text.startswith("fprop.") else text

    pairs: dict[tuple[str, str], None] = {}
    for name in (*mf.presets(), EDEN_RECIPE):
        p = mf.Recipe(name)
        for row, col in ((p.fprop.a, p.wgrad.b), (p.fprop.b, p.dgrad.b), (p.dgrad.a, p.wgrad.a)):
            if any(pair := (cast(row), cast(col))):
                pairs[pair] = None
    return list(pairs)


def random_bytes(*shape: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randint(256, shape, generator=g, dtype=torch.uint8)
