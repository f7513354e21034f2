// minifloat/groups.h: the checks before a backend is called, and the CPU's backend itself.
#include "minifloat/groups.h"

#include <cstring>
#include <limits>

#include "memory_checks.h"
#include "minifloat/error.h"
#include "minifloat/group_checks.h"
#include "minifloat/tensor_ref.h"
#include "on_device.h"
#if defined(MINIFLOAT_WITH_CUDA)
#include "cuda/backend.h"
#endif

namespace minifloat {
namespace cpu {
namespace {

void build_group_table(const std::int32_t* offs, std::int64_t groups, std::int64_t rows,
                       std::int32_t* table, const Execution&) {
  const std::int64_t pitch = groups + 1;
  for (int row = 0; row < kGroupTableRows; ++row) table[row * pitch] = 0;
  for (std::int64_t e = 0; e < groups; ++e) {
    const std::int32_t begin = table[e];
    const std::int32_t end = group_end(offs[e], begin, static_cast<std::int32_t>(rows));
    table[e + 1] = end;
    for (int i = 0; i < kGroupUnits; ++i) {
      std::int32_t* const columns = table + (1 + i) * pitch + e;
      columns[1] = columns[0] + group_cols(end - begin, kSmallestUnit << i);
    }
  }
}

void clear_past_groups(const GroupTable& groups, void* rows, std::int64_t row_bytes,
                       std::int64_t count, const Execution&) {
  const std::int64_t end = groups.of_rows()[groups.count];
  std::memset(static_cast<char*>(rows) + end * row_bytes, 0,
              static_cast<std::size_t>((count - end) * row_bytes));
}

}  // namespace
}  // namespace cpu

void build_group_table(const std::int32_t* offs, std::int64_t groups, std::int64_t rows,
                       std::int32_t* table, Device device, const Execution& execution) {
  constexpr std::int64_t kLargestUnit = kSmallestUnit << (kGroupUnits - 1);
  check_device("build_group_table", device);
  MINIFLOAT_CHECK(0 <= groups && groups <= kMostGroups, "build_group_table: expected at most ",
                  kMostGroups, " groups, got ", groups);
  MINIFLOAT_CHECK(is_addressable({rows}) && grouped_cols(rows, kLargestUnit, groups) <=
                                                std::numeric_limits<std::int32_t>::max(),
                  "build_group_table: expected 0 to 2^31 - 128 * (groups + 1) rows, got ", rows);
  Memory memory("build_group_table");
  memory.reads("the groups' ends", offs, groups * 4, 4);
  memory.writes("the table", table, bytes_of_table({table, static_cast<int>(groups)}), 4);
  memory.require_apart();
  MINIFLOAT_ON(device, build_group_table(offs, groups, rows, table, execution));
}

void check_group_table(const char* function, const GroupTable& groups, Device device, int unit,
                       std::int64_t most) {
  MINIFLOAT_CHECK(0 <= groups.count && groups.count <= kMostGroups, function, ": expected at most ",
                  kMostGroups, " groups, got ", groups.count);
  MINIFLOAT_CHECK(groups || groups.count == 0, function, ": expected a table of ", groups.count,
                  " groups, got null");
  for (const int of_unit : {groups.unit, unit})
    MINIFLOAT_CHECK(of_unit == 0 || is_group_unit(of_unit), function,
                    ": expected a unit of 16, 32, 64 or 128 columns of groups, or 0, got ",
                    of_unit);
  if (!groups || device != Device::kCpu) return;
  MINIFLOAT_CHECK(reinterpret_cast<std::uintptr_t>(groups.table) % 4 == 0, function,
                  ": expected a table of groups at a multiple of 4 bytes");
  const std::int32_t* const rows = groups.of_rows();
  const std::int32_t* const places = groups.under(unit);
  bool is_table = rows[0] == 0 && places[0] == 0;
  for (int e = 0; e < groups.count && is_table; ++e) {
    const std::int64_t count = std::int64_t{rows[e + 1]} - rows[e];
    const std::int64_t taken = unit > 0 ? group_cols<std::int64_t>(count, unit) : count;
    is_table = count >= 0 && std::int64_t{places[e + 1]} - places[e] == taken;
  }
  MINIFLOAT_CHECK(is_table && places[groups.count] <= most, function,
                  ": expected groups as build_group_table writes them, with the last end at most ",
                  most, ", got ", is_table ? "the end " : "other boundaries, and the end ",
                  places[groups.count]);
}

void clear_past_groups(const GroupTable& groups, void* rows, std::int64_t row_bytes,
                       std::int64_t count, Device device, const Execution& execution) {
  check_device("clear_past_groups", device);
  MINIFLOAT_CHECK(is_addressable({count, row_bytes}),
                  "clear_past_groups: expected sizes of zero or ", "more, 2^48 bytes at most, got ",
                  count, " rows of ", row_bytes);
  check_group_table("clear_past_groups", groups, device, 0, count);
  if (!groups || row_bytes == 0 || count == 0) return;
  Memory memory("clear_past_groups");
  memory.reads("the groups", groups.table, bytes_of_table(groups), 4);
  memory.writes("rows", rows, count * row_bytes);
  memory.require_apart();
  MINIFLOAT_ON(device, clear_past_groups(groups, rows, row_bytes, count, execution));
}

}  // namespace minifloat
