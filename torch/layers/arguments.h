// The layers of one call of linear, linear_group, linear_sharded or mlp, which gradients they need,
// and their checks. layer_call.h reads them from an op's arguments. A product of experts is one
// such layer, whose rows lie in groups (grouped_mm.cpp).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "layers/operands.h"
#include "layers/sharding.h"
#include "layers/weight_sums.h"

namespace minifloat::torch_ops {

// A list with an element for each layer of a call, which has few: nothing is allocated for two.
template <class T>
using PerLayer = c10::SmallVector<T, 2>;

inline constexpr const char* kGroupedMm = "scaled_grouped_mm";  // the op, for errors

// Operands that were quantized before the call, as layer_operands returns them: eight tensors of x,
// and eight of each weight. Empty: none.
struct Prequantized {
  at::TensorList x, weight;
};

// Where backward adds the gradients of weights. main_grads: one a weight, or none. That of a frozen
// weight is not read.
struct WeightSums {
  Accumulation accumulation = {};
  at::TensorList main_grads = {};
};

// The ranks that hold shards of a layer's weight; null: this process has the whole weight.
// gathered: x for wgrad, where several layers read x; or null
struct Shards {
  const Sharding* sharding = nullptr;
  c10::intrusive_ptr<GatheredInput> gathered = {};
};

// The rows of x and g of experts, which lie in groups, one for each matrix of W (E, N, K).
struct RowGroups {
  Tensor table;
  std::optional<Tensor> row_ids = {};  // which random bits each row draws; none: its position
  std::int64_t first_expert = 0;
  bool zeroes_tail = true;  // rows of y and dx past the last group are zero; else not written
};

// The layers of a call. All tensors are defined, as the autograd function requires. rng and
// histories are empty, or have one tensor for each weight.
struct Layers {
  at::TensorList weights;
  at::TensorList biases;     // of the layers that have one
  PerLayer<int> bias_index;  // of each weight's bias in biases; -1: none
  at::TensorList rng, histories;
  at::IntArrayRef streams;          // of the layers, besides those in rng; empty: zeros
  bool recomputes_weights = false;  // whether backward quantizes weights again
  Prequantized prequantized;
  Shards shards;
  WeightSums sums = {};
  // Of experts, whose one weight is B (E, K, N), the transpose of W, and whose bias is (E, N).
  // None: weights are W (N, K).
  std::optional<RowGroups> groups = {};

  const char* op() const { return groups ? kGroupedMm : "linear"; }  // for errors
  std::optional<Tensor> bias_of(std::size_t i) const {
    return bias_index[i] < 0 ? std::nullopt : std::optional(biases[bias_index[i]]);
  }
  // Returns the eight tensors of a weight that the caller passed, or none.
  at::TensorList operands_of_weight(std::size_t i) const {
    // Those of experts are of one weight; prequantized_both counts them.
    return groups || prequantized.weight.empty() ? prequantized.weight
                                                 : prequantized.weight.slice(8 * i, 8);
  }
  std::array<SymInt, 2> features_of(std::size_t i) const {
    const Tensor& w = weights[i];
    if (groups) return {w.sym_size(2), w.sym_size(1)};
    return {w.sym_size(0), w.sym_size(1)};
  }
};

// The gradients that autograd needs.
struct NeededGradients {
  bool dx = false;
  bool any_dw = false;
  PerLayer<bool> dw, db;

  NeededGradients() = default;
  explicit NeededGradients(bool needs_dx) : dx(needs_dx) {}
  NeededGradients(const Tensor& x, const Layers& layers);
  NeededGradients(bool dx, const Layers& layers);
  bool any() const;
};

// Returns whether `recompute` names the weights' codes. Raises ValueError for other texts than ""
// and "weight".
bool recomputes_weights(const char* op, const std::string& recompute);

// Returns the dtype of torch.autocast. Raises ValueError for one that products do not take.
at::ScalarType autocast_dtype(c10::DeviceType device);

// While one lives, this thread runs an op below autocast, where torch does not show that it is on.
class BelowAutocast {
 public:
  BelowAutocast();
  BelowAutocast(const BelowAutocast&) = delete;
  BelowAutocast& operator=(const BelowAutocast&) = delete;
  ~BelowAutocast();

 private:
  bool before_;
};

// Returns whether autocast rounds what layers read of a tensor's device. torch knows none of meta.
bool is_autocast(const Tensor& t);

// Raises ValueError for arguments that do not fit, before anything is computed or sent.
void check_layers(const Tensor& x, const Layers& layers, const PreparedRecipe& recipe);

}  // namespace minifloat::torch_ops
