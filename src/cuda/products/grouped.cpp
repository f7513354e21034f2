#include "cuda/products/grouped.h"

namespace minifloat::cuda {

void grouped_product(const GroupedProduct& product, const Execution& execution) {
  if (product.a.elements == Elements::kBf16) return grouped_bf16_product(product, execution);
  if (product.a.elements == Elements::kE5m2) return grouped_e5m2_product(product, execution);
  if (product.a.scales != GroupScales::k1x128) return grouped_e4m3_product(product, execution);
  return product.groups.unit == 0 ? grouped_blocks_by_rows(product, execution)
                                  : grouped_blocks_by_columns(product, execution);
}

}  // namespace minifloat::cuda
