// The plans of the casts of a SwiGLU's gradients and of h, as their kernel's argument.
#pragma once

#include "cuda/quantize/cast_vec16.cuh"

namespace minifloat::cuda {

struct GradientPlans {
  KernelOperand row[2], col[2], h;  // of d_gate and d_up; their current_amax is null
  // Raised by the amaxes of this call; null: not. Of d_gate, h and d_up: rowwise, columnwise.
  std::uint32_t* current_amax[6];
  bool finds_amaxes;  // any of them
};

}  // namespace minifloat::cuda
