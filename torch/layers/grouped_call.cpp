#include "layers/grouped_call.h"

#include <ATen/ATen.h>

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

}  // namespace

GroupedCall grouped_call(const std::string& recipe, at::ScalarType out_dtype,
                         const std::optional<Tensor>& bias, const std::optional<Tensor>& rng,
                         const std::optional<Tensor>& row_ids, std::int64_t first_expert,
                         const std::optional<Tensor>& amax_history, const std::string& tail,
                         std::int64_t stream, const std::optional<at::TensorList>& a_operands,
                         const std::optional<at::TensorList>& weight_operands,
                         const std::string& recompute) {
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
