// minifloat/random_state.h: the call of a backend, and the CPU's backend itself.
#include "minifloat/random_state.h"

#include "minifloat/core/philox.h"
#include "on_device.h"
#if defined(MINIFLOAT_WITH_CUDA)
#include "cuda/state/state.h"
#endif

namespace minifloat {
namespace cpu {
namespace {

void advance_random_state(std::int64_t* state, std::int64_t* copy, const Execution&) {
  minifloat::advance_random_state(state, copy);
}

}  // namespace
}  // namespace cpu

void advance_random_state(std::int64_t* state, std::int64_t* copy, Device device,
                          [[maybe_unused]] const Execution& execution) {
  check_device("advance_random_state", device);
  MINIFLOAT_ON(device, advance_random_state(state, copy, execution));
}

}  // namespace minifloat
