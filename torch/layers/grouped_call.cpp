// The ops of products of experts. scaled_grouped_mm_backward computes the backward pass of
// scaled_grouped_mm from A and W themselves. Of a weight that ranks cut along N or K (sharding.h),
// scaled_grouped_mm_sharded computes a rank's part: columns of y and a term of the sum dA, or a
// term of the sum y and columns of dA. The ops are composite: the dispatcher sees group_table,
// quantize and scaled_mm below them (grouped_mm.cpp).
#include "layers/grouped_call.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <utility>

#include "layers/arguments.h"
#include "minifloat/error.h"
#include "ops/bridge.h"

namespace minifloat::torch_ops {
namespace {

bool zeroes_tail(const std::string& tail) {
  TORCH_CHECK_VALUE(tail == "zero" || tail == "undefined", kGroupedMm,
                    ": expected tail 'zero' or 'undefined', got '", printable(tail), "'");
  return tail == "zero";
}

// Returns the arguments of the ops scaled_grouped_mm and scaled_grouped_mm_backward, in the order
// of their schemas; recompute is scaled_grouped_mm's alone. The tensors must outlive the call.
GroupedCall grouped_call(const std::string& recipe, at::ScalarType out_dtype,
                         const std::optional<Tensor>& bias, const std::optional<Tensor>& rng,
                         const std::optional<Tensor>& row_ids, std::int64_t first_expert,
                         const std::optional<Tensor>& amax_history, const std::string& tail,
                         std::int64_t stream, const std::optional<at::TensorList>& a_operands,
                         const std::optional<at::TensorList>& weight_operands,
                         const std::string& recompute = "") {
  return {.recipe = prepare(recipe),
          .out_dtype = out_dtype,
          .stream = stream,
          .first_expert = first_expert,
          .zeroes_tail = zeroes_tail(tail),
          .bias = list_of(bias),
          .rng = list_of(rng),
          .row_ids = list_of(row_ids),
          .history = list_of(amax_history),
          .a_operands = a_operands.value_or(at::TensorList()),
          .weight_operands = weight_operands.value_or(at::TensorList()),
          .recomputes_weights = recomputes_weights(kGroupedMm, recompute)};
}

}  // namespace

void check_states(at::TensorList rng, at::TensorList history, const Tensor& like,
                  const SymInt& experts) {
  for (const Tensor& state : rng) {
    bridge::check_rng(kGroupedMm, state, like);
    bridge::check_memory_if_real(kGroupedMm, "rng", state);
  }
  for (const Tensor& amaxes : history) check_history(kGroupedMm, amaxes, like, experts);
}

void check_call(const Tensor& a, const Tensor& b, const Tensor& offs, const GroupedCall& call) {
  bridge::check_value_dtype(kGroupedMm, "A", a);
  bridge::check_value_dtype(kGroupedMm, "B", b);
  TORCH_CHECK_VALUE(a.dim() == 2 && b.dim() == 3 && a.sym_size(1) == b.sym_size(1), kGroupedMm,
                    ": expected A (M, K) and B (E, K, N), got ", a.sym_sizes(), " and ",
                    b.sym_sizes());
  TORCH_CHECK_VALUE(
      offs.scalar_type() == at::kInt && offs.dim() == 1 && offs.sym_size(0) == b.sym_size(0),
      kGroupedMm, ": expected offs as int32 (", b.sym_size(0), "), one end for each of B's ",
      "matrices, got ", offs.scalar_type(), " ", offs.sym_sizes());
  TORCH_CHECK_VALUE(bridge::is_value_dtype(call.out_dtype), kGroupedMm,
                    ": expected out_dtype float32 or bfloat16, got ", call.out_dtype);
  TORCH_CHECK_VALUE(call.first_expert >= 0, kGroupedMm,
                    ": expected first_expert of 0 or more, got ", call.first_expert);
  for (const auto& [name, t] : {std::pair{"B", &b}, std::pair{"offs", &offs}})
    TORCH_CHECK_VALUE(t->device() == a.device(), kGroupedMm, ": expected ", name, " on ",
                      a.device(), ", got ", t->device());
  const PreparedRecipe& recipe = call.recipe;
  if (call.sharding) {
    const Sharding& sharding = *call.sharding;
    check_sharding(kGroupedMm, sharding, a);
    TORCH_CHECK_VALUE(sharding.parts >= 1, kGroupedMm, ": expected weight_parts of 1 or more, got ",
                      sharding.parts);
    const SymInt length = b.sym_size(2 - sharding.weight_dim);  // of W, the transpose of B
    TORCH_CHECK_VALUE(length % sharding.parts == 0, kGroupedMm, ": expected ",
                      "NK"[sharding.weight_dim],
                      " as a multiple of weight_parts = ", sharding.parts, ", got ", length);
    check_shards(kGroupedMm, recipe, sharding, length / sharding.parts);
  }
  for (const Place place : {kFpropX, kDgradG, kWgradG, kWgradX})
    TORCH_CHECK_VALUE(!recipe.specs[place].has_blocks_2d(), kGroupedMm, ": expected ",
                      kOperands[place].name,
                      " with blocks of one row, which the end of a group "
                      "cannot cut, got ",
                      recipe.specs[place].str());
  TORCH_CHECK_VALUE(!recipe.is_stochastic || !call.rng.empty(), kGroupedMm, ": recipe ",
                    recipe.text,
                    " rounds stochastically and needs rng, an int64 tensor (seed, count)");
  TORCH_CHECK_VALUE(!recipe.is_delayed || !call.history.empty(), kGroupedMm, ": recipe ",
                    recipe.text, " scales by history and needs amax_history");
  check_states(call.rng, call.history, a, b.sym_size(0));
  for (const Tensor& ids : call.row_ids) {
    TORCH_CHECK_VALUE(
        ids.scalar_type() == at::kInt && ids.dim() == 1 && ids.sym_size(0) == a.sym_size(0),
        kGroupedMm, ": expected row_ids as int32 (", a.sym_size(0), "), got ", ids.scalar_type(),
        " ", ids.sym_sizes());
    bridge::check_same_device(kGroupedMm, "row_ids", ids, a);
    bridge::check_memory_if_real(kGroupedMm, "row_ids", ids);
  }
  for (const Tensor& bias : call.bias) {
    bridge::check_value_dtype(kGroupedMm, "bias", bias);
    TORCH_CHECK_VALUE(
        bias.dim() == 2 && bias.sym_size(0) == b.sym_size(0) && bias.sym_size(1) == b.sym_size(2),
        kGroupedMm, ": expected bias (", b.sym_size(0), ", ", b.sym_size(2), "), got ",
        bias.sym_sizes());
    bridge::check_same_device(kGroupedMm, "bias", bias, a);
    bridge::check_memory_if_real(kGroupedMm, "bias", bias);
  }
}

}  // namespace minifloat::torch_ops

namespace minifloat {
namespace {

using namespace torch_ops;

Tensor scaled_grouped_mm_kernel(const Tensor& a, const Tensor& b, const Tensor& offs,
                                const std::string& recipe, at::ScalarType out_dtype,
                                const std::optional<Tensor>& bias, const std::optional<Tensor>& rng,
                                const std::optional<Tensor>& row_ids, std::int64_t first_expert,
                                const std::optional<Tensor>& amax_history, const std::string& tail,
                                std::int64_t stream,
                                const std::optional<at::TensorList>& a_operands,
                                const std::optional<at::TensorList>& weight_operands,
                                const std::string& recompute) {
  return multiply_groups(
      a, b, offs,
      grouped_call(recipe, out_dtype, bias, rng, row_ids, first_expert, amax_history, tail, stream,
                   a_operands, weight_operands, recompute));
}

Tensor scaled_grouped_mm_sharded_kernel(
    const Tensor& a, const Tensor& b, const Tensor& offs, const std::string& recipe,
    const std::string& group, std::int64_t rank, std::int64_t ranks, std::int64_t weight_dim,
    std::int64_t weight_parts, at::ScalarType out_dtype, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& rng, const std::optional<Tensor>& row_ids,
    const std::optional<Tensor>& amax_history, std::int64_t stream,
    const std::optional<at::TensorList>& weight_operands, const std::string& recompute) {
  GroupedCall call =
      grouped_call(recipe, out_dtype, bias, rng, row_ids, /*first_expert=*/0, amax_history, "zero",
                   stream, std::nullopt, weight_operands, recompute);
  call.sharding = Sharding{.group = group,
                           .rank = rank,
                           .ranks = ranks,
                           .weight_dim = weight_dim,
                           .token_dim = {},
                           .parts = weight_parts};
  return multiply_groups(a, b, offs, call);
}

std::tuple<Tensor, Tensor, Tensor> scaled_grouped_mm_backward_kernel(
    const Tensor& grad, const Tensor& a, const Tensor& b, const Tensor& offs,
    const std::string& recipe, std::array<bool, 3> needed, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& rng, const std::optional<Tensor>& row_ids,
    std::int64_t first_expert, const std::optional<Tensor>& amax_history, const std::string& tail,
    std::int64_t stream, const std::optional<at::TensorList>& a_operands,
    const std::optional<at::TensorList>& weight_operands, const std::optional<Tensor>& rows_from,
    const std::optional<at::TensorList>& g_operands) {
  GroupedCall call = grouped_call(recipe, a.scalar_type(), bias, rng, row_ids, first_expert,
                                  amax_history, tail, stream, a_operands, weight_operands);
  if (g_operands) call.g_operands = *g_operands;
  // Also where no gradient that reads them is needed.
  if (!a_operands) bridge::check_memory_if_real(kGroupedMm, "A", a);
  if (!weight_operands) bridge::check_memory_if_real(kGroupedMm, "B", b);
  GroupedGradients d = group_gradients(grad, a, b, offs, call, needed, rows_from);
  return {std::move(d.a), std::move(d.b), std::move(d.bias)};
}

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, CompositeImplicitAutograd, m) {
  m.impl("scaled_grouped_mm", scaled_grouped_mm_kernel);
  m.impl("scaled_grouped_mm_sharded", scaled_grouped_mm_sharded_kernel);
  m.impl("scaled_grouped_mm_backward", scaled_grouped_mm_backward_kernel);
}

}  // namespace minifloat
