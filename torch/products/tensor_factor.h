// The factor of a whole operand that decoded values and block-scaled codes are still to be
// multiplied by.
#pragma once

#include <ATen/core/Tensor.h>

#include "minifloat/spec.h"

namespace minifloat::torch_ops {

using at::Tensor;

// Requires the one number that tensor_factor_of reads. name: the operand's
void check_tensor_factor(const char* op, const char* name, const Spec& spec, const Tensor& scale,
                         const Tensor& amax);

// Returns the factor under a spec with a tensor amax: fp32 (), on its device.
Tensor tensor_factor_of(const Spec& spec, const Tensor& scale, const Tensor& amax);

}  // namespace minifloat::torch_ops
