// Advances the random state of stochastic rounding: one thread, because each launch costs the host
// more than the kernel takes.
#include "cuda/common/launch.h"
#include "cuda/state/state.h"
#include "minifloat/core/philox.h"

namespace minifloat::cuda {
namespace {

__global__ void __launch_bounds__(32) advance(std::int64_t* state, std::int64_t* copy) {
  if (threadIdx.x == 0) minifloat::advance_random_state(state, copy);
}

}  // namespace

void advance_random_state(std::int64_t* state, std::int64_t* copy, const Execution& execution) {
  advance<<<1, 32, 0, cuda_stream(execution)>>>(state, copy);
  check_launch("advance_random_state");
}

}  // namespace minifloat::cuda
