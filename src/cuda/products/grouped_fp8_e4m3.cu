#include "cuda/products/grouped_fp8.cuh"

namespace minifloat::cuda {

void grouped_e4m3_product(const GroupedFp8Product& product, const Execution& execution) {
  launch_grouped<cutlass::float_e4m3_t>(product, execution);
}

}  // namespace minifloat::cuda
