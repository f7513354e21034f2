// The CPU backend of minifloat/experts.h.
#pragma once

#include "minifloat/experts.h"

namespace minifloat::cpu {

void swiglu(const SwiGlu& of, void* h, const Execution& execution);
void swiglu_backward(const SwiGlu& of, const SwiGluGradients& gradients,
                     const Execution& execution);
void swiglu_backward_with_amaxes(const SwiGlu& of, const SwiGluGradients& gradients, float* amaxes,
                                 int count, const Operand* h_col, const Execution& execution);
void quantize_swiglu(const SwiGlu& of, const Operand* rowwise, const Operand* columnwise,
                     const Execution& execution);
void quantize_swiglu_backward(const SwiGlu& of, const void* dh, std::int64_t dh_stride,
                              const SwiGluCasts& casts, const Execution& execution);
void take_rows(const TakeRows& copy, const Execution& execution);
void pack_rows(const PackRows& pack, const Execution& execution);
void add_slots(const AddSlots& sum, const Execution& execution);

}  // namespace minifloat::cpu
