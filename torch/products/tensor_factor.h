// The tensor scale of an operand, which is a pending factor of its decoded values and of its
// block-scaled codes.
#pragma once

#include <ATen/core/Tensor.h>

#include "minifloat/spec.h"

namespace minifloat::torch_ops {

using at::Tensor;

// Requires the one number that tensor_factor_of reads. name: of the operand, for the message.
void check_tensor_factor(const char* op, const char* name, const Spec& spec, const Tensor& scale,
                         const Tensor& amax);

// Returns the tensor scale under a spec with a tensor amax: fp32 (), on the device of amax.
Tensor tensor_factor_of(const Spec& spec, const Tensor& scale, const Tensor& amax);

}  // namespace minifloat::torch_ops
