// The arguments of a product of experts, their checks, and the product and its gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "layers/arguments.h"

namespace minifloat::torch_ops {

// The arguments of a call. All tensors of lists are defined, as the autograd function requires.
struct GroupedCall {
  const PreparedRecipe& recipe;
  at::ScalarType out_dtype;
  std::int64_t stream, first_expert;
  bool zeroes_tail;  // rows of y and dA past the last group are zero; else they are not written
  at::TensorList bias, rng, row_ids, history;  // one tensor, or none
  at::TensorList a_operands, weight_operands;  // as layer_operands returns them, or none
  bool recomputes_weights = false;             // whether backward quantizes B again
  std::optional<Sharding> sharding = {};       // none: this process has the matrices whole
  at::TensorList g_operands = {};              // as a_operands; none: the gradient is cast
  Tensor table = {};                           // of the groups; undefined: made from offs
  // Of both directions of B: where its cast in forward leaves it, and what backward's cast takes.
  // Null, undefined: it is not kept, and each cast finds its own.
  Tensor* keeps_amax = nullptr;
  Tensor amax = {};
  // Of the gradient, what both casts of it may scale by: (M) of its rows, and (E, N) of each
  // group's columns; undefined: the casts find what they need.
  Tensor g_amax_of_rows = {}, g_amax_of_columns = {};
};

// Requires a product's random state and amax history of this many experts, on the device of `like`.
void check_states(at::TensorList rng, at::TensorList history, const Tensor& like,
                  const SymInt& experts);

// Requires the shapes, dtypes and devices of A (M, K), B (E, K, N), offs (E) and the call, and
// shards that hold whole blocks.
void check_call(const Tensor& a, const Tensor& b, const Tensor& offs, const GroupedCall& call);

// Returns A · B of each group, (M, N), differentiable in A, B and the bias.
Tensor multiply_groups(const Tensor& a, const Tensor& b, const Tensor& offs,
                       const GroupedCall& call);

// Returns whether the amaxes of the gradient's rows and columns save its casts a read of it.
bool takes_gradient_amaxes(const PreparedRecipe& recipe);

// Of A, B and the bias; undefined where one is not needed.
struct GroupedGradients {
  Tensor a, b, bias;
};

// Rows as products read them. Where operands are given, values are a tensor of their shape alone.
struct Rows {
  Tensor values;                 // (M, K)
  std::vector<Tensor> operands;  // eight tensors, or none: each product quantizes the values
};

// Takes dA, undefined where it is not needed, and returns A as wgrad reads it.
using TakeGradient = std::function<Rows(Tensor da)>;

// Returns the gradients that multiply_groups computes, from A and B instead of saved operands. Each
// operand is freed with the product that reads it.
//   needed: of A, B and the bias; rows_from: the row of grad of each row of y; none: its own
//   take: called between the two products; dA is then not returned, and of `a` only the shape,
//   dtype and device are read. Null: A is `a` and the call's operands
GroupedGradients group_gradients(Tensor grad, const Tensor& a, const Tensor& b, const Tensor& offs,
                                 const GroupedCall& call, const std::array<bool, 3>& needed,
                                 const std::optional<Tensor>& rows_from = std::nullopt,
                                 const TakeGradient& take = nullptr);

}  // namespace minifloat::torch_ops
