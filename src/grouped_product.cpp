// minifloat/grouped_product.h: the checks before the kernels are called.
#include "minifloat/grouped_product.h"

#include <cstdint>
#include <limits>

#include "memory_checks.h"
#include "minifloat/core/block.h"
#include "minifloat/error.h"
#if defined(MINIFLOAT_WITH_CUTLASS)
#include "cuda/products/grouped.h"
#endif

namespace minifloat {
namespace {

bool has_blocks(const GroupedOperand& x) {
  return x.scales == GroupScales::k1x128 || x.scales == GroupScales::k128x128;
}

bool is_known(GroupScales scales) {
  return scales == GroupScales::kNone || scales == GroupScales::kGroups ||
         scales == GroupScales::kRows || scales == GroupScales::k1x128 ||
         scales == GroupScales::k128x128;
}

constexpr const char* kName = "grouped_product";

void check_lengths(const GroupedProduct& p) {
  constexpr std::int64_t kMost = std::numeric_limits<int>::max();
  const int row_unit = p.a.elements == Elements::kBf16 ? 8 : 16;
  MINIFLOAT_CHECK(p.n % 8 == 0 && p.k % row_unit == 0 && p.n > 0 && p.k > 0 && p.m > 0, kName,
                  ": expected m above 0, n a multiple of 8 and k of ", row_unit, ", got ", p.m,
                  ", ", p.n, " and ", p.k);
  MINIFLOAT_CHECK(p.m <= kMost && p.n <= kMost && p.k <= kMost, kName,
                  ": expected m, n and k of at most ", kMost, ", got ", p.m, ", ", p.n, " and ",
                  p.k);
}

void check_groups(const GroupedProduct& p) {
  const auto& [boundaries, count, unit] = p.groups;
  MINIFLOAT_CHECK(boundaries && 0 < count && count <= kMostGroups, kName, ": expected 1 to ",
                  kMostGroups, " groups, got ", boundaries ? count : 0);
  const int least_unit = has_blocks(p.a) ? 128 : kSmallestUnit;
  MINIFLOAT_CHECK(unit == 0 || (is_group_unit(unit) && unit >= least_unit), kName,
                  ": expected a unit of 16, 32, 64 or 128 columns, at least ", least_unit, ", got ",
                  unit);
}

// Adds the memory of an operand.
//   matrices: that are multiplied by themselves, 1 or one a group   scaled: those with scales
void check_operand(const char* name, const char* scale_name, const GroupedOperand& x,
                   const GroupedProduct& p, std::int64_t rows, std::int64_t matrices,
                   std::int64_t scaled, Memory& memory) {
  constexpr std::int64_t kBlock = 128;
  memory.reads(name, x.values, matrices * rows * p.k * (x.elements == Elements::kBf16 ? 2 : 1), 16);
  const std::int64_t blocks = ceil_div(p.k, kBlock);
  const std::int64_t scales = x.scales == GroupScales::kNone     ? 0
                              : x.scales == GroupScales::kGroups ? p.groups.count
                              : x.scales == GroupScales::kRows   ? scaled * rows
                              : x.scales == GroupScales::k1x128
                                  ? rows * blocks
                                  : matrices * ceil_div(rows, kBlock) * blocks;
  memory.reads(scale_name, x.scale, scales * 4, 4);
}

void check_product(const GroupedProduct& p) {
  const bool is_along_rows = p.groups.unit == 0;
  check_groups(p);
  check_lengths(p);
  MINIFLOAT_CHECK(has_grouped_kernel(p.a, p.b, is_along_rows), kName,
                  ": expected elements and scales that a kernel multiplies (has_grouped_kernel)");
  MINIFLOAT_CHECK(!p.bias || is_along_rows, kName,
                  ": expected no bias with groups along the contraction dimension");
  const std::int64_t groups = p.groups.count;
  Memory memory(kName);
  memory.reads("the groups", p.groups.table, bytes_of_table(p.groups), 4);
  check_operand("a", "the scale of a", p.a, p, p.m, 1, is_along_rows ? 1 : groups, memory);
  check_operand("b", "the scale of b", p.b, p, p.n, is_along_rows ? groups : 1, groups, memory);
  if (p.bias) memory.reads("bias", p.bias, groups * p.n * 2, 2);
  memory.writes("out", p.out, (is_along_rows ? 1 : groups) * p.m * p.n * 2, 16);
  memory.require_apart();
}

}  // namespace

bool has_grouped_kernel(const GroupedOperand& a, const GroupedOperand& b, bool is_along_rows) {
  if (!is_known(a.scales) || !is_known(b.scales)) return false;
  if (a.elements == Elements::kBf16)
    return b.elements == Elements::kBf16 && !has_blocks(a) && !has_blocks(b);
  if (b.elements != Elements::kE4m3) return false;
  if (has_blocks(a) || has_blocks(b))
    return a.elements == Elements::kE4m3 && a.scales == GroupScales::k1x128 &&
           b.scales == (is_along_rows ? GroupScales::k128x128 : GroupScales::k1x128);
  return a.elements == Elements::kE4m3 || a.elements == Elements::kE5m2;
}

bool has_grouped_products() {
#if defined(MINIFLOAT_WITH_CUTLASS)
  return true;
#else
  return false;
#endif
}

void grouped_product(const GroupedProduct& product, [[maybe_unused]] const Execution& execution) {
  check_product(product);
#if defined(MINIFLOAT_WITH_CUTLASS)
  cuda::grouped_product(product, execution);
#else
  fail(kName, ": expected a build with CUTLASS's headers, got none");
#endif
}

}  // namespace minifloat
