// The table of a matrix's groups of rows (core/groups.h), and what builds it.
#pragma once

#include <cstdint>

#include "minifloat/core/groups.h"

namespace minifloat {

enum class Device : std::uint8_t;
struct Execution;

// A table, in the memory of the device of its operand; default: no groups.
struct GroupTable {
  const std::int32_t* table = nullptr;  // (kGroupTableRows, count + 1)
  int count = 0;
  // For values: the unit of the columnwise operand. For an operand: the unit of groups along the
  // contraction dimension; 0: they lie along rows.
  int unit = 0;

  explicit operator bool() const { return table != nullptr; }
  // Return the groups' boundaries, (count + 1): among rows, or under a unit.
  const std::int32_t* of_rows() const { return table; }
  const std::int32_t* under(int of_unit) const {
    return table + group_table_row(of_unit) * (count + 1);
  }
};

// Builds a table from the ends of `groups` groups among `rows` rows, in one launch. Ends that fall,
// are negative or lie past the rows are moved to the nearest legal end.
//   offs: int32 (groups)   table: int32 (kGroupTableRows, groups + 1)
void build_group_table(const std::int32_t* offs, std::int64_t groups, std::int64_t rows,
                       std::int32_t* table, Device device, const Execution& execution);

// Sets the rows past the last group to zero.
//   rows: (count, row_bytes), contiguous
void clear_past_groups(const GroupTable& groups, void* rows, std::int64_t row_bytes,
                       std::int64_t count, Device device, const Execution& execution);

}  // namespace minifloat
