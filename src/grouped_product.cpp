// minifloat/grouped_product.h: the checks before the kernels are called.
#include "minifloat/grouped_product.h"

#include <cstddef>
#include <cstdint>
#include <limits>

#include "minifloat/error.h"
#if defined(MINIFLOAT_WITH_CUTLASS)
#include "cuda/products/grouped.h"
#endif

namespace minifloat {
namespace {

bool has_blocks(const GroupedOperand& x) {
  return x.scales == GroupScales::k1x128 || x.scales == GroupScales::k128x128;
}

}  // namespace

bool has_grouped_kernel(const GroupedOperand& a, const GroupedOperand& b, bool is_along_rows) {
  if (a.elements == Elements::kBf16)
    return b.elements == Elements::kBf16 && !has_blocks(a) && !has_blocks(b);
  if (b.elements != Elements::kE4m3) return false;
  if (has_blocks(a) || has_blocks(b))
    return a.elements == Elements::kE4m3 && a.scales == GroupScales::k1x128 &&
           b.scales == (is_along_rows ? GroupScales::k128x128 : GroupScales::k1x128);
  return a.elements == Elements::kE4m3 || a.elements == Elements::kE5m2;
}

#if defined(MINIFLOAT_WITH_CUTLASS)

bool has_grouped_products() { return true; }

namespace {

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

// Requires memory at a multiple of `alignment` bytes.
void check_address(const char* name, const void* address, std::size_t alignment) {
  MINIFLOAT_CHECK(address && reinterpret_cast<std::uintptr_t>(address) % alignment == 0, kName,
                  ": expected ", name, " at a multiple of ", alignment, " bytes, got ",
                  address ? "another address" : "none");
}

void check_operand(const char* name, const char* scale_name, const GroupedOperand& x) {
  check_address(name, x.values, 16);
  if (x.scales != GroupScales::kNone) check_address(scale_name, x.scale, sizeof(float));
}

}  // namespace

void grouped_product(const GroupedProduct& product, const Execution& execution) {
  const auto& [a, b, groups, m, n, k, fast, bias, out] = product;
  const bool is_along_rows = groups.unit == 0;
  check_groups(product);
  check_lengths(product);
  MINIFLOAT_CHECK(has_grouped_kernel(a, b, is_along_rows), kName,
                  ": expected elements and scales that a kernel multiplies (has_grouped_kernel)");
  check_operand("a", "the scale of a", a);
  check_operand("b", "the scale of b", b);
  check_address("out", out, 16);
  MINIFLOAT_CHECK(!bias || is_along_rows, kName,
                  ": expected no bias with groups along the contraction dimension");
  if (bias) check_address("bias", bias, sizeof(*bias));
  cuda::grouped_product(product, execution);
}

#else

bool has_grouped_products() { return false; }

void grouped_product(const GroupedProduct&, const Execution&) {
  MINIFLOAT_CHECK(false, "grouped_product: expected a build with CUTLASS's headers, got none");
}

#endif

}  // namespace minifloat
