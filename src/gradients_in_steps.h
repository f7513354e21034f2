// The gradients of gate and up with their amaxes, one step after the other. The CPU computes them
// so, and a GPU where no kernel does all at once.
#pragma once

#include "minifloat/experts.h"

namespace minifloat {

// As swiglu_backward_with_amaxes. h is cast first: gradients.gate may be dh.
template <class Backend>
void gradients_in_steps(const SwiGlu& of, const SwiGluGradients& gradients, float* amaxes,
                        int count, const Operand* h_col, const Execution& execution) {
  if (h_col) Backend::quantize_swiglu(of, nullptr, h_col, execution);
  Backend::swiglu_backward(of, gradients, execution);
  TensorRef x = of.h_at(gradients.gate);
  x.row_stride = gradients.stride;
  Backend::amax(x, {kWholeTensor}, amaxes, execution);
  x.data = gradients.up;
  if (count > 1) Backend::amax(x, {kWholeTensor}, amaxes + 1, execution);
}

}  // namespace minifloat
