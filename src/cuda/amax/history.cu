// Rolls amax histories: a thread a row. Rows are few and short, so nothing is staged.
#include "cuda/amax/history.h"

#include "cuda/common/launch.h"
#include "minifloat/core/amax_history.h"
#include "minifloat/core/block.h"

namespace minifloat::cuda {
namespace {

constexpr int kRowsOfBlock = 128;

__global__ void __launch_bounds__(kRowsOfBlock) roll_rows(AmaxHistories h) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kRowsOfBlock + threadIdx.x;
  if (i < h.count) roll_amax_history(h.rows + i * (1 + h.length), h.length, h.algorithm, h.margin);
}

}  // namespace

void roll_amax_histories(const AmaxHistories& histories, const Execution& execution) {
  const unsigned blocks =
      grid_of(ceil_div<std::int64_t>(histories.count, kRowsOfBlock), "roll_amax_histories");
  roll_rows<<<blocks, kRowsOfBlock, 0, cuda_stream(execution)>>>(histories);
  check_launch("roll_amax_histories");
}

}  // namespace minifloat::cuda
