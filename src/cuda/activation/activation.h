// The CUDA backend of minifloat/experts.h's activations: nothing waits for the device.
#pragma once

#include "minifloat/experts.h"

namespace minifloat::cuda {

void swiglu(const SwiGlu& of, void* h, const Execution& execution);
void swiglu_backward(const SwiGlu& of, const SwiGluGradients& gradients,
                     const Execution& execution);
void swiglu_backward_with_amaxes(const SwiGlu& of, const SwiGluGradients& gradients, float* amaxes,
                                 int count, const Operand* h_col, const Execution& execution);
void quantize_swiglu(const SwiGlu& of, const Operand* rowwise, const Operand* columnwise,
                     const Execution& execution);
void quantize_swiglu_backward(const SwiGlu& of, const void* dh, std::int64_t dh_stride,
                              const SwiGluCasts& casts, const Execution& execution);

// Quantizes h as the kernels compute it, without h in memory. Returns false, and casts nothing,
// where no kernel fits; the amaxes may then be cleared.
bool quantize_swiglu_in_one(const SwiGlu& of, const Operand* rowwise, const Operand* columnwise,
                            const Execution& execution);

// Writes the gradients of groups and the amaxes of their rows and columns at once. Returns false,
// and writes nothing, where no kernel fits.
bool swiglu_backward_of_groups(const SwiGlu& of, const SwiGluGradients& gradients,
                               const Execution& execution);

}  // namespace minifloat::cuda
