#include "cuda/products/grouped.cuh"

namespace minifloat::cuda {

void grouped_blocks_by_columns(const GroupedProduct& product, const Execution& execution) {
  launch_grouped<GroupedGemm<BlockSums<1, cute::GMMA::Major::MN>>>(product, execution);
}

}  // namespace minifloat::cuda
