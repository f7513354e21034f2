"""What torch 2.11 requires of aten::_scaled_grouped_mm_v2's arguments under block scales, in order.

torch has no Meta kernel of this op, so its checks need a GPU. Each is an assertion here, with its
file and line; lines were read from the machine code of torch 2.11.0+cu130's wheel:

    GroupedBlas.cpp, GroupedMMUtils.h             aten/src/ATen/native/cuda and native
    mx8mx8bf16_grouped.cu, f4f4bf16_grouped.cu,
    grouped_common.cuh                            MSLK, whose kernels torch calls

    a (M, K) · b (E, K, N)   -> (M, N)       offs: ends among a's rows
    a (M, K) · b (K, N)      -> (E, M, N)    offs: ends along the contraction dimension
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

E8M0, E4M3, FP4 = torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.float4_e2m1fn_x2
RECIPES = {  # of a side: scaling, dtypes of the scales, dtype of the codes
    "mxfp8": ([ScalingType.BlockWise1x32], [E8M0], E4M3),
    "mxfp4": ([ScalingType.BlockWise1x32], [E8M0], FP4),
    "nvfp4": ([ScalingType.BlockWise1x16, ScalingType.TensorWise], [E4M3, torch.float32], FP4),
}
LEAST_GROUP = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}  # columns that a group has a multiple of


def round_up(x: int, unit: int) -> int:
    return -(-x // unit) * unit


def require(condition: bool, where: str, what: str) -> None:
    assert condition, f"{where}: {what}"


def require_strides(name: str, mat: Tensor) -> None:
    """check_valid_strides_and_return_transposed of GroupedMMUtils.h."""
    where, unit = "GroupedMMUtils.h, strides", 16 // mat.element_size()
    require(mat.data_ptr() % 16 == 0, where, f"{name} at a multiple of 16 bytes")
    (rows, cols), (row, col) = mat.shape[-2:], mat.stride()[-2:]
    is_column_major = row == 1 and col >= max(1, rows)
    require(is_column_major or (col == 1 and row >= max(1, cols)), where, f"{name} is a matrix")
    require((col if is_column_major else row) % unit == 0, where, f"{name}'s rows of 16 bytes")


def require_scale(name: str, mat: Tensor, scale: Tensor, block: int, groups: int) -> None:
    """The blocked scales of a, or of b transposed: mat (…, rows, columns of elements)."""
    require(scale.dim() == 2, "GroupedBlas.cpp:330, 368", f"{name} has 2 dimensions")
    if mat.dim() == 2:
        require(scale.size(0) >= mat.size(0), "GroupedBlas.cpp:342", f"{name} has all rows")
    else:
        per_byte = 2 if mat.dtype == FP4 else 1
        bytes_of_one = round_up(mat.size(1), 128) * round_up(mat.size(2) * per_byte // block, 4)
        require(scale.shape == (groups, bytes_of_one), "GroupedBlas.cpp:373", f"size of {name}")


def recipe_of(sides: dict[str, Any], scalings: list[list[int]]) -> str:
    """Returns the recipe by which torch chooses the kernel: that of both sides' lists and dtypes.

    MXFP8's checks repeat the dtypes in GroupedBlas.cpp:95, FP4's in :236 to :259.
    """
    for recipe, (scaling, dtypes, codes) in RECIPES.items():
        names = [s.value for s in scaling]
        is_of_lists = all(list(given) == names for given in scalings)
        if is_of_lists and all(
            mat.dtype == codes and [s.dtype for s in scales] == dtypes
            for mat, scales in sides.values()
        ):
            return recipe
    raise AssertionError("GroupedBlas.cpp:597: no gemm implementation was found")


def require_accepted(
    a: Tensor,
    b: Tensor,
    a_scales: list[Tensor],
    a_scaling: list[int],
    a_swizzle: list[int],
    b_scales: list[Tensor],
    b_scaling: list[int],
    b_swizzle: list[int],
    offs: Tensor,
) -> str:
    """Requires what torch requires. The engine passes bf16 as out_dtype, and no bias (:557, :569).

    Returns:
        The recipe of the kernel: mxfp8, mxfp4 or nvfp4.

    Raises:
        AssertionError: torch would refuse; the message begins with the file and line.
    """
    cpp = "GroupedBlas.cpp"
    require(a.stride(-1) == 1, f"{cpp}:525", "a is row-major")
    require(b.stride(-2) == 1, f"{cpp}:526", "b is column-major")
    require_strides("a", a)
    require_strides("b", b)
    require(a.dim() in (2, 3), f"{cpp}:527", "a has 2 or 3 dimensions")
    require(b.dim() in (2, 3), f"{cpp}:528", "b has 2 or 3 dimensions")
    if b.dim() == 3:
        require(a.size(-1) == b.size(-2), f"{cpp}:542", "as long a contraction of both")
    require(a.size(-1) % 16 == 0, f"{cpp}:545", "a multiple of 16 columns of a")
    require(b.size(-2) % 16 == 0, f"{cpp}:551", "a multiple of 16 rows of b")
    require(b.size(-1) % 16 == 0, f"{cpp}:551", "a multiple of 16 columns of b")
    require(offs.dim() == 1, f"{cpp}:564", "offs has 1 dimension")
    require(offs.dtype == torch.int32, f"{cpp}:565", "offs in int32")
    groups = offs.size(0)
    if b.dim() == 3:
        require(groups == b.size(0), "GroupedMMUtils.h:50", "an end for each matrix")
    sides = {"a": (a, a_scales), "b": (b.transpose(-2, -1), b_scales)}
    recipe = recipe_of(sides, [a_scaling, b_scaling])
    for name, (mat, scales) in sides.items():
        require_scale(f"scale of {name}", mat, scales[0], LEAST_GROUP[recipe], groups)
    if recipe == "mxfp8":
        layout = [SwizzleType.SWIZZLE_32_4_4.value]
        require(list(a_swizzle) == list(b_swizzle) == layout, f"{cpp}:620, 101", "32_4_4 alone")
    require(a.dim() == 2, f"{cpp}:91", "a of 2 dimensions")
    require_accepted_by_mslk(recipe, sides, groups)
    require_readable(recipe, sides, offs.tolist(), b.dim() == 3)
    return recipe


def require_accepted_by_mslk(recipe: str, sides: dict[str, Any], groups: int) -> None:
    is_fp8 = recipe == "mxfp8"
    cu = "mx8mx8bf16_grouped.cu" if is_fp8 else "f4f4bf16_grouped.cu"
    for name, (mat, scales) in sides.items():
        require(mat.is_contiguous(), f"{cu}:{'477, 478' if is_fp8 else '386, 387'}", name)
        lines = "479, 480" if is_fp8 else "393, 394"
        require(scales[0].is_contiguous(), f"{cu}:{lines}", f"scale of {name}")
        if recipe == "nvfp4":
            # The kernel multiplies group g by element g of the product of both tensor scales,
            # and nobody checks how many there are.
            require(scales[1].is_contiguous(), f"{cu}:398, 400", f"tensor scales of {name}")
            require(scales[1].shape == (groups,), "grouped_common.cuh:79", f"of {name}, a group")
    (a, _), (b, _) = sides.values()
    require(a.size(-1) == b.size(-1), f"{cu}:{'499, 520' if is_fp8 else '425, 438'}", "one K")


def require_readable(recipe: str, sides: dict[str, Any], ends: list[int], along_rows: bool) -> None:
    """The device's assertions, and that each kernel reads within a's and b's scales."""
    where = "grouped_common.cuh:100-236"
    unit, block = LEAST_GROUP[recipe], LEAST_GROUP[recipe]
    a = sides["a"][0]
    columns = a.size(1) * (2 if a.dtype == FP4 else 1)
    taken = dict.fromkeys(sides, 0)
    for begin, end in itertools.pairwise([0, *ends]):
        require(begin <= end <= (a.size(0) if along_rows else columns), where, "ends that rise")
        if along_rows:
            taken["a"] += round_up(end - begin, 128) * round_up(columns // block, 4)
        else:
            require((end - begin) % unit == 0, where, f"groups of a multiple of {unit}")
            for name, (mat, _) in sides.items():
                taken[name] += round_up(mat.size(0), 128) * round_up((end - begin) // block, 4)
    for name, (_, scales) in sides.items():
        require(taken[name] <= scales[0].numel(), where, f"bytes of the scale of {name}")
