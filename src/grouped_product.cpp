// minifloat/grouped_product.h: the checks before the kernels are called.
#include "minifloat/grouped_product.h"

#include "minifloat/error.h"
#if defined(MINIFLOAT_WITH_CUTLASS)
#include "cuda/products/grouped_fp8.h"
#endif

namespace minifloat {

#if defined(MINIFLOAT_WITH_CUTLASS)

bool has_grouped_fp8() { return true; }

void grouped_fp8_product(const GroupedFp8Product& product, const Execution& execution) {
  const auto& [a, b, groups, m, n, k, fast, out] = product;
  MINIFLOAT_CHECK(groups && groups.count > 0, "grouped_fp8_product: expected groups, got none");
  MINIFLOAT_CHECK(n % 16 == 0 && k % 16 == 0 && n > 0 && k > 0 && m > 0,
                  "grouped_fp8_product: expected m above 0, n and k multiples of 16, got ", m, ", ",
                  n, " and ", k);
  MINIFLOAT_CHECK(b.elements == Elements::kE4m3 &&
                      (a.elements == Elements::kE4m3 || a.elements == Elements::kE5m2),
                  "grouped_fp8_product: expected E4M3 or E5M2 times E4M3 codes");
  cuda::grouped_fp8_product(product, execution);
}

#else

bool has_grouped_fp8() { return false; }

void grouped_fp8_product(const GroupedFp8Product&, const Execution&) {
  MINIFLOAT_CHECK(false, "grouped_fp8_product: expected a build with CUTLASS's headers, got none");
}

#endif

}  // namespace minifloat
