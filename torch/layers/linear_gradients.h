// The gradients of one linear layer: of linear.cpp, and of the op linear_backward (layer_ops.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "layers/passes.h"

namespace minifloat::torch_ops {

struct LayerGradients {
  Tensor x, weight, bias;  // undefined where none is needed
};

// What backward reads of an x whose tokens the ranks cut.
struct CutInput {
  std::vector<SymInt> shape = {};
  c10::intrusive_ptr<GatheredInput> gathered = {};  // that the layers which read x share, or null
};

// Returns the gradients of layer `i` from grad (…, N); that of x is (M, K).
//   x: for wgrad; where several layers share x, in the form that their products read, from the
//      first on. Gathered here where the ranks cut the tokens
//   saved: three tensors of x, then three of each weight
LayerGradients linear_gradients(const SavedLayers& layers, const NeededGradients& needs,
                                std::size_t i, const Tensor& grad, ProductInput& x,
                                const std::vector<Tensor>& saved, const CutInput& cut = {});

}  // namespace minifloat::torch_ops
