// Makes second derivatives through quantized products raise.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <string>

namespace minifloat::torch_ops {

// Makes the gradients of a quantized product raise where they are differentiated: a function of
// codes has no derivative. Their history names the tensors that they were computed from, the inputs
// of `node` and the gradients of its outputs, so that any second derivative on the way to one of
// those raises.   op: for the error; node: the one whose backward calls this
torch::autograd::variable_list refuse_double_backward(const std::string& op,
                                                      const std::string& recipe,
                                                      const torch::autograd::Node& node,
                                                      const torch::autograd::variable_list& grads,
                                                      torch::autograd::variable_list gradients);

}  // namespace minifloat::torch_ops
