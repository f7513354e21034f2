// Checks and kernel inputs that the ops of activations share.
#pragma once

#include <ATen/core/Tensor.h>

#include "minifloat/experts.h"
#include "ops/activation.h"

namespace minifloat::torch_ops {

// Raises ValueError for arguments that an op of activations does not take.
//   dh: null: the op takes none; is_matrix: gate must have two dimensions
void check_activation(const char* op, const ActivationArguments& of, const Tensor* dh,
                      bool is_matrix);

// The inputs as matrices, and the arguments of the kernels, which point into them.
struct ActivationInputs {
  Tensor gate, up, dh;
  SwiGlu of;
};
ActivationInputs inputs_of(const char* op, const ActivationArguments& a,
                           const Tensor* dh = nullptr);

// Requires options of a cast that is not asked for on the device of `like`, within their memory.
void check_unread(const char* op, const QuantizeOptions& options, const Tensor& like);

// Returns uninitialized memory of gate's shape and dtype.
Tensor empty_like_gate(const Tensor& gate);

}  // namespace minifloat::torch_ops
