#include "cuda/products/grouped_fp8.cuh"

namespace minifloat::cuda {

void grouped_e5m2_product(const GroupedFp8Product& product, const Execution& execution) {
  launch_grouped<cutlass::float_e5m2_t>(product, execution);
}

}  // namespace minifloat::cuda
