"""Hadamard transforms, swizzled scales, transposed codes, and tables of groups of rows."""

from __future__ import annotations

from torch import Tensor

from .._native import ops
from ..checks import require_bool

HADAMARD_SIGNS = 0xD7E8  # a bit a point, repeated every 16; a set bit is -1


def hadamard(
    x: Tensor,
    points: int = 16,
    *,
    columnwise: bool = False,
    signs: int = HADAMARD_SIGNS,
    groups: Tensor | None = None,
    group_unit: int = 0,
) -> Tensor:
    """Computes the randomised Hadamard transform along the columns as read.

    Args:
        x: (rows, cols) or (batch, rows, cols), float32 or bfloat16.
        points: 16, 32, 64 or 128.
        columnwise: whether to transform the transpose, along x's rows.
        signs: 16 bits, one a point and repeated every 16; a set bit is -1.
        groups: the table that group_table(offs, rows) returned, for x (rows, cols). Each group
            is transformed as a matrix of its own.
        group_unit: least unit of the columns of columnwise groups: 16, 32, 64 or 128; 0: `points`.

    Returns:
        bfloat16 (…, rows, cols) as read, with cols padded to a multiple of `points`; (cols, L) of
        columnwise groups. Values of no group are unspecified.

    Raises:
        ValueError: an argument is not as expected.

    Source: docs/numerics.md, sections 6 and 10; the default signs are Transformer Engine's.

    Example:
        >>> mf.tensor.hadamard(16 * torch.eye(16)[:1])[0, :4]  # an outlier, spread
        tensor([4., 4., 4., 4.], dtype=torch.bfloat16)
    """
    return ops.hadamard(x, points, columnwise, signs, groups=groups, group_unit=group_unit)


def swizzle_scales(scale: Tensor, *, offs: Tensor | None = None, groups: str = "") -> Tensor:
    """Copies one-byte scales to the 128x4 tiles that block-scaled tensor-core products read.

    Args:
        scale: (rows, cols) or (batch, rows, cols), float8_e4m3fn, float8_e8m0fnu or uint8.
        offs: int32 (groups), the end of each group of rows or columns of the scales. The last may
            lie below their number: scales past it have no tile.
        groups: "m" or "k": the dimension that `offs` cuts; each group has tiles of its own. "": no
            groups.

    Returns:
        The scales in tiles, padded to whole tiles.

    Raises:
        ValueError: an argument is not as expected.

    Source: the scale layout of cuBLAS's block-scaled products (core/swizzle.h).

    Example:
        >>> scale = mf.tensor.quantize(torch.ones(256, 64), "mxfp8").scale
        >>> scale.shape, mf.tensor.swizzle_scales(scale).shape  # padded to 128x4 tiles
        (torch.Size([256, 2]), torch.Size([256, 4]))
    """
    return ops.swizzle_scales(scale, offs=offs, groups=groups)


def unswizzle_scales(
    swizzled: Tensor, rows: int, cols: int, *, offs: Tensor | None = None, groups: str = ""
) -> Tensor:
    """Copies swizzled scales back to rows and columns, the inverse of mf.tensor.swizzle_scales.

    Args:
        swizzled: a result of mf.tensor.swizzle_scales.
        rows: of the scales.
        cols: of the scales.
        offs: as mf.tensor.swizzle_scales had it.
        groups: as mf.tensor.swizzle_scales had it.

    Returns:
        (rows, cols) or (batch, rows, cols), in the dtype of `swizzled`.

    Raises:
        ValueError: an argument is not as expected.

    Example:
        >>> scale = mf.tensor.quantize(torch.ones(256, 64), "mxfp8").scale
        >>> tiles = mf.tensor.swizzle_scales(scale)
        >>> torch.equal(mf.tensor.unswizzle_scales(tiles, rows=256, cols=2), scale)
        True
    """
    return ops.unswizzle_scales(swizzled, rows, cols, offs=offs, groups=groups)


def transpose_codes(codes: Tensor, cols: int) -> Tensor:
    """Transposes packed 4-bit codes.

    Args:
        codes: uint8 (…, rows, ⌈cols / 2⌉), the low nibble first.
        cols: of the matrix.

    Returns:
        uint8 (…, cols, ⌈rows / 2⌉).

    Raises:
        ValueError: `codes` does not have ⌈cols / 2⌉ bytes a row.

    Example:
        >>> codes = torch.tensor([[0x21], [0x43]], dtype=torch.uint8)  # rows: codes 1, 2 and 3, 4
        >>> [hex(byte) for byte in mf.tensor.transpose_codes(codes, cols=2).flatten().tolist()]
        ['0x31', '0x42']
    """
    return ops.transpose_codes(codes, cols)


def group_table(offs: Tensor, rows: int) -> Tensor:
    """Builds the table of a matrix's groups from their ends, in one launch and without a sync.

    Group e has the rows [end_(e-1), end_e), where end_e = min(max(offs[e], end_(e-1), 0), rows) and
    end_(-1) = 0. Ends that fall, are negative or lie past the rows are thus moved to the nearest
    legal end; under mf.tensor.check_groups(True) they are an error.

    Args:
        offs: int32 (E), the end of each group, on the device of the matrix. At most 1,023 groups.
        rows: of the matrix.

    Returns:
        int32 (5, E + 1). Row 0: the groups' boundaries among rows, 0, end_0, …. Row 1 + i: their
        boundaries among columns under the unit U = 16 · 2^i, where a group of m rows takes
        U · max(1, ⌈m / U⌉) columns.

    Raises:
        ValueError: `offs` is not int32 (E), has more than 1,023 ends, or `rows` is negative or so
            large that a boundary would exceed int32.

    Source: docs/numerics.md, section 10.

    Example:
        >>> offs = torch.tensor([3, 3, 8], dtype=torch.int32)  # the second group is empty
        >>> mf.tensor.group_table(offs, rows=8)
        tensor([[  0,   3,   3,   8],
                [  0,  16,  32,  48],
                [  0,  32,  64,  96],
                [  0,  64, 128, 192],
                [  0, 128, 256, 384]], dtype=torch.int32)
    """
    return ops.group_table(offs, rows)


def check_groups(enabled: bool) -> bool:
    """Chooses whether group_table raises for ends that it would move. It waits for the device.

    The choice holds for the process. The error names the op and the first such group.

    Args:
        enabled: False at first.

    Returns:
        The former choice.

    Raises:
        TypeError: `enabled` is no bool.

    Example:
        >>> offs = torch.tensor([3, 9], dtype=torch.int32)
        >>> mf.tensor.group_table(offs, rows=8)[0]
        tensor([0, 3, 8], dtype=torch.int32)
        >>> before = mf.tensor.check_groups(True)
        >>> mf.tensor.group_table(offs, rows=8)
        Traceback (most recent call last):
        ValueError: group_table: expected ends of groups that rise from 0 to 8 at most, got 9 ...
        >>> mf.tensor.check_groups(before)
        True
    """
    return ops.check_groups(require_bool("check_groups: enabled", enabled))
