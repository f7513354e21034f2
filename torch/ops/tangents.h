// Forward-mode differentiation stops at codes, which have no derivative: with an error, not with a lost tangent.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace minifloat::torch_ops {

// NotImplementedError where t has a tangent. op, name: what the error speaks of.
void check_no_tangent(const char* op, const char* name, const at::Tensor& t);

// The autograd kernel of an op whose results have no derivative: backward passes end there, and tangents are errors.
torch::CppFunction without_derivative();

}  // namespace minifloat::torch_ops
