// Functions that one file of this folder defines and another calls, besides those of backends.h.
#pragma once

#include "minifloat/experts.h"

namespace minifloat::cuda {

// Quantizes h as the kernels compute it, without h in memory. Returns false, and launches
// nothing, where no kernel fits.
bool quantize_swiglu_in_one(const SwiGlu& of, const Operand* rowwise, const Operand* columnwise,
                            const Execution& execution);

// Writes the gradients of groups and the amaxes of their rows and columns at once. Returns false,
// and writes nothing, where no kernel fits.
bool swiglu_backward_of_groups(const SwiGlu& of, const SwiGluGradients& gradients,
                               const Execution& execution);

}  // namespace minifloat::cuda
