// What torch.compile records of a dense feed-forward, besides the cast of x, which layers share:
//
//     mlp_forward     casts the weights and h, and multiplies: returns y, and what backward reads
//     mlp_backward    the whole backward pass: returns all gradients
//
// layer_ops.h has the same of linear layers.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "layers/mlp.h"

namespace minifloat::torch_ops {

// Returns whether torch.compile traces a forward pass that is recorded as mlp_forward.
bool records_mlp(const MlpForward& pass, const Tensor& x);

// Returns y (M, N) from x as it was cast for fprop, and saves what backward reads besides x.
Tensor record_mlp(const MlpForward& pass, const QuantizedOperand& x);

// Returns whether a backward pass is recorded as mlp_backward.
bool records_mlp_gradients(const MlpLayers& layers, const std::vector<Tensor>& grads);

// Returns what mlp_gradients does, by the op mlp_backward.
std::vector<Tensor> record_mlp_gradients(const MlpLayers& layers, const std::vector<Tensor>& saved,
                                         const Tensor& dy);

}  // namespace minifloat::torch_ops
