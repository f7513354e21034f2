// What the ops share that torch.compile records of layers (layer_ops.h, mlp_ops.h): the checks of
// what a trace passes, all before a cast writes to an amax history, and empty tensors in the place
// of undefined ones.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "layers/grouped_call.h"
#include "layers/passes.h"

namespace minifloat::torch_ops {

// Returns what an op returned, or undefined where it is an empty vector: what the op did not
// compute. A matrix without rows stays.
inline Tensor or_undefined(const Tensor& t) {
  return t.dim() == 1 && t.sym_numel() == 0 ? Tensor() : t;
}

inline std::optional<Tensor> or_none(const Tensor& t) {
  return t.defined() ? std::optional(t) : std::nullopt;
}

// Returns uninitialized memory, as an op on Meta returns it.
Tensor empty_result(const Tensor& like, c10::SymIntArrayRef shape, at::ScalarType dtype);

// Returns whether torch.compile traces layers whose forward is recorded: the weights are quantized
// here, whole, as are the rows of experts, and their products read codes.   t: of the trace
bool records_forward(const PreparedRecipe& recipe, const Layers& layers, const Tensor& t);

// Returns whether the backward pass of layers is recorded: their weights are whole, and autograd
// receives the gradients.
bool records_backward(const SavedLayers& layers, const std::vector<Tensor>& grads);

// Returns whether backward reads weight i itself, which it casts again.
bool saves_weight_itself(const ForwardPass& pass);

// Returns whether an op writes weight i for backward with swizzled scales. The trace asks: the op's
// meta kernel knows no device, and so no engine.
bool returns_swizzled(const ForwardPass& pass, std::size_t i);

// Requires a recipe whose forward is recorded.
void check_recipe(const char* op, const PreparedRecipe& recipe);

// Requires the state that a recipe needs of one layer.   like: on the layer's device
void check_state(const char* op, const PreparedRecipe& recipe, const std::optional<Tensor>& rng,
                 const std::optional<Tensor>& history, const Tensor& like);

// Requires the groups of a call of experts, and its state.   rows: of x; b: B (E, K, N)
void check_groups_of_call(const char* op, const GroupedCall& call, const SymInt& rows,
                          const Tensor& b);

// Requires float32 or bfloat16.
void check_dtype(const char* op, const char* name, at::ScalarType dtype);

// Returns whether a cast of x left the values that an exact product reads.
inline bool is_decoded(const Tensor& x_decoded) {
  return x_decoded.defined() && x_decoded.dim() == 2;
}

// Returns x, of k columns, as a cast for fprop returned it.   x: four tensors; groups: of rows
QuantizedOperand checked_x(const char* op, const PreparedRecipe& recipe, at::TensorList x,
                           const Tensor& weight, const SymInt& k,
                           const std::optional<SymInt>& groups = std::nullopt);

// Requires x (m, k) as wgrad reads it.   x: three tensors; groups: of its rows
void check_saved_x(const char* op, const char* name, const PreparedRecipe& recipe, at::TensorList x,
                   const SymInt& m, const SymInt& k, const Groups& groups = {});

// Requires W (n, k) itself with the amax of its columnwise cast, or as codes; or B (experts, k, n).
//   w: three tensors
void check_saved_weight(const char* op, const PreparedRecipe& recipe, at::TensorList w,
                        const SymInt& n, const SymInt& k,
                        const std::optional<SymInt>& experts = std::nullopt);

}  // namespace minifloat::torch_ops
