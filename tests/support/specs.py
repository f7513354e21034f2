"""The specs that tests of one operand run over: every format, scale rule and block."""

import re

import torch
from minifloat._native import ops

# Every element format and block, with every rounding of its scale. Tests add `+sr` and transforms.
BASES = [
    "e4m3/tensor",
    "e5m2/tensor",
    "e4m3/row",
    "e4m3/row+exact",
    "e4m3/1x128",
    "e4m3/128x128",
    "e4m3/1x128+exact",
    "e4m3/128x128+exact",
    "mxfp8",
    "mxfp8+floor",
    "mxfp8/e5m2",
    "mxfp8/e5m2+floor",
    "mxfp8/32x32",
    "mxfp8/32x32+floor",
    "mxfp4",
    "mxfp4+floor",
    "nvfp4",
    "nvfp4+up",
    "nvfp4+pow2",
    "nvfp4/16x16",
    "nvfp4/16x16+up",
    "nvfp4/16x16+pow2",
    "nvfp4+4over6",
    "nvfp4/16x16+4over6",
    "nvfp4/row",
    "nvfp4/row+up",
    "e1m2/1x16",
    "e1m2/1x16+up",
    "e1m2/1x16+pow2",
    "e1m2/16x16",
    "e1m2/16x16+up",
    "e1m2/16x16+pow2",
    "e1m2/1x32",
    "e1m2/1x32+floor",
]
# The same, delayed scaling, which needs an amax from the caller, and MS-EDEN, which needs random
# bits and takes no further flags.
WEIGHT_BASES = [spec for spec in BASES if not spec.startswith("nvfp4/row")]  # of any matrix
SPECS = [*BASES, "e4m3/tensor+delayed", "nvfp4+eden"]

EDEN_RECIPE = "fprop=nvfp4*nvfp4/16x16 dgrad=nvfp4+eden*nvfp4+eden wgrad=nvfp4+eden*nvfp4+eden"
# DeepSeek-V3's blocks, and tokens whose codes depend on no other token.
BLOCKS_RECIPE = (
    "fprop=e4m3/1x128+exact*e4m3/128x128+exact dgrad=e4m3/1x128+exact*e4m3/128x128+exact "
    "wgrad=e4m3/1x128+exact*e4m3/1x128+exact"
)
ROWS_RECIPE = (
    "fprop=nvfp4/row*nvfp4/16x16 dgrad=nvfp4/row+sr*nvfp4/16x16 "
    "wgrad=nvfp4/row+sr+rht*nvfp4/row+rht"
)
# A uniform grid, a transform on all products, and gradients alone rounded stochastically (arXiv
# 2606.20381); under powers of two E4M3 holds its values.
UNIFORM_RECIPE = (
    "fprop=e1m2/1x16+rht*e1m2/1x16+rht dgrad=e1m2/1x16+sr+rht*e1m2/1x16+rht "
    "wgrad=e1m2/1x16+sr+rht*e1m2/1x16+rht"
)
UNIFORM_POW2_RECIPE = UNIFORM_RECIPE.replace("1x16", "1x16+pow2")
# Backward reads the values of fprop's codes: under a tensor's amax, drawn, under amaxes of earlier
# steps, transformed (values that bf16 holds, and others), or such as an FP8 product could read.
OF_FORWARD_RECIPE = "fprop=e4m3/tensor*e4m3/tensor dgrad=bf16*fprop.w wgrad=bf16*fprop.x"
OF_FORWARD_RECIPES = [
    OF_FORWARD_RECIPE,
    "fprop=nvfp4/row+sr*nvfp4+sr dgrad=bf16*fprop.w wgrad=bf16*fprop.x",
    "fprop=e4m3/tensor+delayed*e4m3/tensor+delayed dgrad=e5m2/tensor+delayed*fprop.w "
    "wgrad=mxfp8*fprop.x",
    "fprop=mxfp4+rht*mxfp4+rht dgrad=bf16*fprop.w wgrad=bf16*fprop.x",
    "fprop=e1m2/1x16+rht64*nvfp4+rht64 dgrad=bf16*fprop.w wgrad=bf16*fprop.x",
    "fprop=nvfp4+pow2*nvfp4+pow2 dgrad=nvfp4+sr*fprop.w wgrad=bf16*fprop.x",
]


def written(row: str, col: str) -> str:
    """Returns a recipe whose weight is read in these formats."""
    x, g = ("+".join(["nvfp4", *re.findall(r"rht\d*", spec)]) for spec in (row, col))
    return f"fprop={x}*{row} dgrad={g}*{col} wgrad=nvfp4*nvfp4"


def has_bf16_values(spec: str) -> bool:
    """Whether bf16 holds the values of codes, so that a cast can write them."""
    return "x128" not in spec or "+exact" not in spec


def flagged(spec: str, flags: str) -> str:
    """Returns the spec with `+sr` and a transform; without them where it has its own."""
    return spec if "+eden" in spec else spec + flags


def stream_of(spec: str, operand: str) -> int:
    """Returns the random stream of an operand, such as "w/dgrad", within its module."""
    if "+eden" not in spec:
        return ops.stream(operand)
    is_second = operand in ("w/fprop", "w/dgrad", "x/wgrad")
    return ops.stream(operand.split("/")[1]) & ~1 | is_second


def untransformed(rows: torch.Tensor, points: int) -> torch.Tensor:
    """Undoes the randomised Hadamard transform of rows (M, whole transforms), in fp32.

    Butterflies have the order of docs/numerics.md, section 6.
    """
    v, stride = rows.float().unflatten(1, (-1, points)), 1
    while stride < points:
        a, b = v.unflatten(2, (-1, 2, stride)).unbind(3)
        v, stride = torch.stack([a + b, a - b], 3).flatten(2), 2 * stride
    signs = torch.tensor([-1.0 if 0xD7E8 >> (i % 16) & 1 else 1.0 for i in range(points)])
    return (v * torch.tensor(points**-0.5) * signs).flatten(1)
