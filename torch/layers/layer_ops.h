// What torch.compile records of a dense layer, or of a product of experts, besides the cast of x,
// which layers share and a partitioner may compute again:
//
//     linear_forward     casts W and multiplies: returns y, and W as backward reads it
//     linear_backward    casts the gradient and multiplies twice: returns all gradients
//
// Each is one call of the host where the ops within, recorded by themselves, are two to four.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "layers/linear_gradients.h"
#include "layers/passes.h"

namespace minifloat::torch_ops {

// Returns y (M, N) of each weight, as multiply_operand does, by the op linear_forward.
std::vector<Tensor> record_forward(const ForwardPass& pass, const QuantizedOperand& x);

// Returns what linear_gradients does of layer i, by the op linear_backward.
LayerGradients record_backward(const SavedLayers& layers, const NeededGradients& needs,
                               std::size_t i, const Tensor& grad, const std::vector<Tensor>& saved);

}  // namespace minifloat::torch_ops
