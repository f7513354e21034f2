#include "cuda/products/grouped.cuh"

namespace minifloat::cuda {

void grouped_bf16_product(const GroupedProduct& product, const Execution& execution) {
  launch_grouped<GroupedGemm<Bf16Sums>>(product, execution);
}

}  // namespace minifloat::cuda
