"""Groups: runs of rows of a matrix, such as the tokens of each expert.

    groups = mf.group_table(offs, x.shape[0])            offs: the end of each group
    q = mf.quantize(x, "mxfp8", groups=groups)           groups along the rows of q
    q = mf.quantize(x, "mxfp8", columnwise=True, groups=groups)     along q's last dimension

The picture and the equations are in include/minifloat/core/groups.h.
"""

from __future__ import annotations

from torch import Tensor

from .._native import ops
from ..checks import require_bool


def group_table(offs: Tensor, rows: int) -> Tensor:
    """Builds the table of a matrix's groups from their ends, in one launch and without a sync.

    Group e has the rows [end_(e-1), end_e), where end_e = min(max(offs[e], end_(e-1), 0), rows) and
    end_(-1) = 0. Ends that fall, are negative or lie past the rows are thus moved to the nearest
    legal end; under mf.check_groups(True) they are an error.

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
    """
    return ops.group_table(offs, rows)


def check_groups(enabled: bool) -> bool:
    """Chooses whether mf.group_table raises for ends that it would move. It waits for the device.

    The choice holds for the process. The error names the op and the first such group.

    Args:
        enabled: False at first.

    Returns:
        The former choice.

    Raises:
        TypeError: `enabled` is no bool.
    """
    return ops.check_groups(require_bool("check_groups: enabled", enabled))
