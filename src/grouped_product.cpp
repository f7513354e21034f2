// minifloat/grouped_product.h: the checks before the kernels are called.
#include "minifloat/grouped_product.h"

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

void grouped_product(const GroupedProduct& product, const Execution& execution) {
  constexpr const char* kName = "grouped_product";
  const auto& [a, b, groups, m, n, k, fast, bias, out] = product;
  MINIFLOAT_CHECK(groups && groups.count > 0, kName, ": expected groups, got none");
  const bool is_along_rows = groups.unit == 0;
  const int row_unit = a.elements == Elements::kBf16 ? 8 : 16;
  MINIFLOAT_CHECK(n % 8 == 0 && k % row_unit == 0 && n > 0 && k > 0 && m > 0, kName,
                  ": expected m above 0, n a multiple of 8 and k of ", row_unit, ", got ", m, ", ",
                  n, " and ", k);
  MINIFLOAT_CHECK(has_grouped_kernel(a, b, is_along_rows), kName,
                  ": expected elements and scales that a kernel multiplies (has_grouped_kernel)");
  constexpr std::int64_t kMost = std::numeric_limits<int>::max();
  MINIFLOAT_CHECK(m <= kMost && n <= kMost && k <= kMost, kName,
                  ": expected m, n and k of at most ", kMost, ", got ", m, ", ", n, " and ", k);
  const int least_unit = has_blocks(a) ? 128 : kSmallestUnit;
  MINIFLOAT_CHECK(is_along_rows || (is_group_unit(groups.unit) && groups.unit >= least_unit), kName,
                  ": expected a unit of 16, 32, 64 or 128 columns, at least ", least_unit, ", got ",
                  groups.unit);
  MINIFLOAT_CHECK(!bias || is_along_rows, kName,
                  ": expected no bias with groups along the contraction dimension");
  cuda::grouped_product(product, execution);
}

#else

bool has_grouped_products() { return false; }

void grouped_product(const GroupedProduct&, const Execution&) {
  MINIFLOAT_CHECK(false, "grouped_product: expected a build with CUTLASS's headers, got none");
}

#endif

}  // namespace minifloat
