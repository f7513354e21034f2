// The arguments of ops of activations as the kernels read them.
#pragma once

#include <ATen/core/Tensor.h>

#include "minifloat/experts.h"
#include "ops/activation.h"

namespace minifloat::torch_ops {

// Checks the arguments.   dh: null: there is none; is_matrix: gate has two dimensions
void check_activation(const char* op, const ActivationArguments& of, const Tensor* dh,
                      bool is_matrix);

// The inputs in memory that the kernels read.
struct ActivationInputs {
  Tensor gate, up, dh;
  SwiGlu of;
};
ActivationInputs inputs_of(const char* op, const ActivationArguments& a,
                           const Tensor* dh = nullptr);

// Requires options of a cast that is not asked for within their memory.
void check_unread(const char* op, const QuantizeOptions& options);

// Returns uninitialized memory of gate's shape and dtype.
Tensor empty_like_gate(const Tensor& gate);

}  // namespace minifloat::torch_ops
