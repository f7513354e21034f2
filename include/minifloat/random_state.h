// The random state of stochastic rounding, advanced once a forward pass (core/philox.h).
#pragma once

#include <cstdint>

#include "minifloat/tensor_ref.h"

namespace minifloat {

// Adds one to the count of `state`, (seed, count), and writes both to `copy`. Threads or streams
// that advance one state at a time get a count each.
void advance_random_state(std::int64_t* state, std::int64_t* copy, Device device,
                          const Execution& execution = {});

}  // namespace minifloat
