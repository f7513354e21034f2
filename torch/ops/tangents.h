// Errors of forward-mode differentiation at codes, which have no derivative: without them the
// tangent would be dropped silently.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace minifloat::torch_ops {

// Raises NotImplementedError where t has a tangent. op, name: of the argument, for the message.
void check_no_tangent(const char* op, const char* name, const at::Tensor& t);

// Returns the autograd kernel of an op whose results have no derivative: its outputs require no
// grad, and a tangent raises.
torch::CppFunction without_derivative();

}  // namespace minifloat::torch_ops
