// Rolls amax histories, a thread a row, and raises their entries, one thread for all: rows are few
// and short, so nothing is staged. Advances the random state of stochastic rounding by one thread,
// because each launch costs the host more than the kernel takes.
#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/state/state.h"
#include "minifloat/core/amax_history.h"
#include "minifloat/core/block.h"

namespace minifloat::cuda {
namespace {

constexpr int kRowsOfBlock = 128;

__global__ void __launch_bounds__(kRowsOfBlock) roll_rows(AmaxHistories h) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kRowsOfBlock + threadIdx.x;
  if (i < h.count) roll_amax_history(h.rows + i * (1 + h.length), h.length, h.algorithm, h.margin);
}

// The amaxes of one launch: those of a layer's operands in a forward or backward pass.
struct FoundAmaxes {
  static constexpr int kMost = 8;
  FoundAmax amaxes[kMost];
  int count;
};
__global__ void __launch_bounds__(32) raise_each(const __grid_constant__ FoundAmaxes found) {
  if (threadIdx.x != 0) return;  // two may raise one entry
  for (int i = 0; i < found.count; ++i)
    *found.amaxes[i].entry = larger_amax(*found.amaxes[i].entry, *found.amaxes[i].amax);
}

__global__ void __launch_bounds__(32) advance(std::int64_t* state, std::int64_t* copy) {
  if (threadIdx.x != 0) return;
  auto* count = reinterpret_cast<unsigned long long*>(state + 1);
  copy[0] = state[0];
  copy[1] = static_cast<std::int64_t>(atomicAdd(count, 1) + 1);  // streams may share the state
}

}  // namespace

void roll_amax_histories(const AmaxHistories& histories, const Execution& execution) {
  const unsigned blocks =
      grid_of(ceil_div<std::int64_t>(histories.count, kRowsOfBlock), "roll_amax_histories");
  roll_rows<<<blocks, kRowsOfBlock, 0, cuda_stream(execution)>>>(histories);
  check_launch("roll_amax_histories");
}

void raise_amaxes(std::span<const FoundAmax> found, const Execution& execution) {
  for (std::size_t i = 0; i < found.size(); i += FoundAmaxes::kMost) {
    FoundAmaxes launch = {};
    launch.count = static_cast<int>(std::min<std::size_t>(found.size() - i, FoundAmaxes::kMost));
    std::copy_n(found.data() + i, launch.count, launch.amaxes);
    raise_each<<<1, 32, 0, cuda_stream(execution)>>>(launch);
    check_launch("raise_amaxes");
  }
}

void advance_random_state(std::int64_t* state, std::int64_t* copy, const Execution& execution) {
  advance<<<1, 32, 0, cuda_stream(execution)>>>(state, copy);
  check_launch("advance_random_state");
}

}  // namespace minifloat::cuda
