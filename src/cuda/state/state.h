// What a model keeps from step to step, on the device: amax histories and the random state.
#pragma once

#include "minifloat/amax_history.h"
#include "minifloat/random_state.h"

namespace minifloat::cuda {

void roll_amax_histories(const AmaxHistories& histories, const Execution& execution);
void raise_amaxes(std::span<const FoundAmax> found, const Execution& execution);
void advance_random_state(std::int64_t* state, std::int64_t* copy, const Execution& execution);

}  // namespace minifloat::cuda
