// Groups: runs of rows of a matrix x, such as the tokens of each expert. A table of them is built
// once from the groups' ends, and is passed with every operand of x (minifloat/groups.h).
//
//     x (rows, C)            operand as read: rowwise (rows, C)     columnwise (C, L)
//     +---------+ 0          groups lie along rows                  along the contraction dimension
//     | group 0 |            +---------+                            +-----+------+-----+---+
//     +---------+ end_0      |         |                            | 0   | 1    |  2  |   |
//     | group 1 |            +---------+                            +-----+------+-----+---+
//     +---------+ end_1      |         |                            0    P_1    P_2   P_E  L
//
//     end_e = min(max(offs[e], end_(e-1), 0), rows)      rows past the last end are not read
//     P_e   = sum over f < e of U * max(1, ceil(m_f / U))     m_f: the rows of group f
//     L     = ceil(rows / U) * U + U * E                 enough for groups of any sizes
//
// Columns of group e past its m_e rows are zeros. U, the unit, is a whole number of blocks and
// transforms, so that blocks begin anew in each group.
#pragma once

#include <cstdint>

#include "minifloat/core/block.h"
#include "minifloat/core/host_device.h"

namespace minifloat {

inline constexpr int kMostGroups = 1023;
inline constexpr int kSmallestUnit = 16;  // units are 16, 32, 64 and 128
inline constexpr int kGroupUnits = 4;

// A table is int32 (kGroupTableRows, groups + 1). Row 0: the groups' boundaries among rows, 0,
// end_0, … Row 1 + i: their boundaries among columns under unit 16 << i, 0, P_1, …
inline constexpr int kGroupTableRows = 1 + kGroupUnits;

constexpr bool is_group_unit(std::int64_t unit) {
  return unit == 16 || unit == 32 || unit == 64 || unit == 128;
}
// Returns the row of a table with the boundaries under a unit; under 0, those among rows.
MINIFLOAT_HD constexpr int group_table_row(int unit) {
  int row = 0;
  for (; unit >= kSmallestUnit; unit /= 2) ++row;
  return row;
}

// Returns the end of a group, from the end that was passed and the end of the group before.
MINIFLOAT_HD constexpr std::int32_t group_end(std::int32_t offs, std::int32_t previous,
                                              std::int32_t rows) {
  const std::int32_t end = offs > previous ? offs : previous;
  return end < rows ? end : rows;
}

// Returns the columns that a group of `rows` rows takes.
template <class Int>
MINIFLOAT_HD constexpr Int group_cols(Int rows, Int unit) {
  return rows > 0 ? round_up<Int>(rows, unit) : unit;
}

// Returns L. Int may be symbolic.
template <class Int>
Int grouped_cols(const Int& rows, const Int& unit, const Int& groups) {
  return round_up<Int>(rows, unit) + unit * groups;
}

// Returns the group that position i lies in, by a table's row of boundaries: the last that begins
// at i or before, which is not empty where i lies before the last boundary.
MINIFLOAT_HD constexpr int group_at(const std::int32_t* boundaries, int groups, std::int32_t i) {
  int low = 0, high = groups - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (boundaries[middle] <= i)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

static_assert(group_table_row(0) == 0 && group_table_row(16) == 1 && group_table_row(128) == 4);

}  // namespace minifloat
