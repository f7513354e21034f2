#include "cuda/products/grouped_fp8.h"

namespace minifloat::cuda {

void grouped_fp8_product(const GroupedFp8Product& product, const Execution& execution) {
  product.a.elements == Elements::kE4m3 ? grouped_e4m3_product(product, execution)
                                        : grouped_e5m2_product(product, execution);
}

}  // namespace minifloat::cuda
