// Errors of second derivatives through quantized products.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <string>

namespace minifloat::torch_ops {

// Gradients of a quantized product are not differentiable: a function of codes has no derivative.
// Gives them a history that raises wherever a second derivative would pass on to what they were
// computed from: the inputs of `node`, whose backward this is, and the gradients of its outputs.
torch::autograd::variable_list refuse_double_backward(const std::string& recipe,
                                                      const torch::autograd::Node& node,
                                                      const torch::autograd::variable_list& grads,
                                                      torch::autograd::variable_list gradients);

}  // namespace minifloat::torch_ops
