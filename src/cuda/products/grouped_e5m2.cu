#include "cuda/products/grouped.cuh"

namespace minifloat::cuda {

void grouped_e5m2_product(const GroupedProduct& product, const Execution& execution) {
  using A = cutlass::float_e5m2_t;
  product.fast ? launch_grouped<GroupedGemm<Fp8Sums<A, true>>>(product, execution)
               : launch_grouped<GroupedGemm<Fp8Sums<A, false>>>(product, execution);
}

}  // namespace minifloat::cuda
