// The random state of stochastic rounding, advanced once a forward pass (core/philox.h).
#pragma once

#include <cstdint>

#include "minifloat/tensor_ref.h"

namespace minifloat {

// Adds one to the count of `state`, (seed, count), and writes both to `copy`.
void advance_random_state(std::int64_t* state, std::int64_t* copy, Device device,
                          const Execution& execution = {});

}  // namespace minifloat
