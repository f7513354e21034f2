#include "cuda/products/grouped.cuh"

namespace minifloat::cuda {

void grouped_blocks_by_rows(const GroupedProduct& product, const Execution& execution) {
  launch_grouped<GroupedGemm<BlockSums<128, cute::GMMA::Major::K>>>(product, execution);
}

}  // namespace minifloat::cuda
