// minifloat/random_state.h: the call of a backend, and the CPU's backend itself.
#include "minifloat/random_state.h"

#include <atomic>

#include "memory_checks.h"
#include "minifloat/core/philox.h"
#include "on_device.h"
#if defined(MINIFLOAT_WITH_CUDA)
#include "cuda/state/state.h"
#endif

namespace minifloat {
namespace cpu {
namespace {

void advance_random_state(std::int64_t* state, std::int64_t* copy, const Execution&) {
  const std::atomic_ref<std::int64_t> count(state[1]);
  copy[0] = state[0];
  copy[1] = static_cast<std::int64_t>(
      static_cast<std::uint64_t>(count.fetch_add(1, std::memory_order_relaxed)) + 1);
}

}  // namespace
}  // namespace cpu

void advance_random_state(std::int64_t* state, std::int64_t* copy, Device device,
                          [[maybe_unused]] const Execution& execution) {
  check_device("advance_random_state", device);
  Memory memory("advance_random_state");
  memory.writes("the state", state, 2 * 8, 8);
  memory.writes("its copy", copy, 2 * 8, 8);
  memory.require_apart();
  MINIFLOAT_ON(device, advance_random_state(state, copy, execution));
}

}  // namespace minifloat
