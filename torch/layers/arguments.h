// The arguments of linear, linear_group and linear_sharded in one form, and their checks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "layers/operands.h"
#include "layers/sharding.h"

namespace minifloat::torch_ops {

// Operands that were quantized before the call, as layer_operands returns them; empty: none. A
// group of layers takes none.
struct Prequantized {
  at::TensorList x, weight;
};

// The ranks that hold shards of a layer's weight; null: this process has the whole weight.
// gathered: x for wgrad, where several layers read x; or null
struct Shards {
  const Sharding* sharding = nullptr;
  c10::intrusive_ptr<GatheredInput> gathered = {};
};

// The layers of a call. All tensors are defined, as the autograd function requires. rng and
// histories are empty, or have one tensor for each weight.
struct Layers {
  at::TensorList weights;
  at::TensorList biases;        // of the layers that have one
  std::vector<int> bias_index;  // of each weight's bias in biases; -1: none
  at::TensorList rng, histories;
  std::int64_t stream = 0;
  Prequantized prequantized;
  Shards shards;

  std::optional<Tensor> bias_of(std::size_t i) const {
    return bias_index[i] < 0 ? std::nullopt : std::optional(biases[bias_index[i]]);
  }
  ModuleState state_of(std::size_t i) const {
    return {.rng = rng.empty() ? Tensor() : rng[i],
            .stream = stream,
            .history = histories.empty() ? Tensor() : histories[i],
            .pending = nullptr,
            .sharding = shards.sharding};
  }
};

// The gradients that autograd needs.
struct Needs {
  bool dx = false;
  bool any_dw = false;
  std::vector<bool> dw, db;

  Needs(const Tensor& x, const Layers& layers);
  bool any() const;
};

// Raises ValueError for arguments that do not fit, before anything is computed or sent.
void check_layers(const Tensor& x, const Layers& layers, const PreparedRecipe& recipe);

}  // namespace minifloat::torch_ops
