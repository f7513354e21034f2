// The products of experts under a recipe, differentiable: rows of group e times matrix e.
//
//     forward    A  -> rowwise for fprop, columnwise for wgrad     one read
//                W  -> rowwise for fprop, columnwise for dgrad     one read
//                y  = A · Wᵀ                                       for each group
//     saved      A columnwise and W columnwise, in their specs, and the table of groups; under
//                recompute W itself instead, which backward quantizes
//     backward   g  -> rowwise for dgrad, columnwise for wgrad     one read
//                dA = g · W,     dW = gᵀ · A                       for each group
//
// group_gradients computes the backward pass from A and W themselves, as the experts' feed-forward
// does (grouped_mlp.cpp).
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "layers/expert_weights.h"
#include "layers/grouped_call.h"
#include "layers/layer_state.h"
#include "layers/operands.h"
#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/op.h"
#include "ops/ops.h"

namespace minifloat {
namespace {

using namespace torch_ops;
using variable_list = std::vector<Tensor>;

std::optional<Tensor> only(at::TensorList list) {
  return list.empty() ? std::nullopt : std::optional(list[0]);
}

// The gradients that are needed.
struct GroupedNeeds {
  bool da, db, dbias;
};

// Values that backward reads besides the saved tensors.
struct GroupedState {
  const PreparedRecipe& recipe;
  at::ScalarType a_dtype, b_dtype, bias_dtype;
  std::int64_t stream, first_expert;
  bool zeroes_tail, has_bias;
  SymInt rows, n;
  GroupedNeeds needs;
  variable_list history, rng;
  std::optional<Tensor> grad_rows_from = {};
  std::optional<Sharding> sharding = {};
};

// Returns the table of A's groups.
Tensor table_of(const GroupedCall& call, const Tensor& offs, const SymInt& rows) {
  return call.table.defined() ? call.table : group_table(kGroupedMm, offs, rows);
}

// Returns the state of an operand whose rows lie in groups, or of the matrices: table undefined.
ModuleState state_of(const GroupedCall& call, const Tensor& table, PendingAmaxes* pending) {
  ModuleState state;
  if (!call.rng.empty()) state.rng = call.rng[0];
  if (!call.history.empty()) state.history = call.history[0];
  state.stream = call.stream;
  state.pending = pending;
  state.first_expert = call.first_expert;
  if (call.sharding) state.sharding = &*call.sharding;
  if (table.defined()) {
    state.groups = {table, wgrad_unit(call.recipe)};
    state.row_ids = only(call.row_ids);
  }
  return state;
}

// Returns A in both directions: quantized here, or by the caller.
Directions input_operands_of(const GroupedCall& call, at::TensorList operands, const Tensor& matrix,
                             const Tensor& table, const Needed& row, const Needed& col,
                             PendingAmaxes& pending) {
  if (operands.empty())
    return quantize_both(call.recipe, matrix, row, col, state_of(call, table, &pending));
  return prequantized_both(call.recipe, kGroupedMm, "a_operands", operands, matrix,
                           matrix.sym_size(0), row, col, table.sym_size(1) - 1);
}

// Returns the amax that backward's cast of W takes, where forward reads codes of it.
Tensor kept_amax_of_codes(const GroupedCall& call, const Tensor& w) {
  const PreparedRecipe& recipe = call.recipe;
  const Tensor &row = call.weight_operands[2], &col = call.weight_operands[6];
  const bool is_of_rows = finds_amaxes_of_columns(recipe.specs[kFpropW], recipe.specs[kDgradW]) &&
                          has_adjacent_columns(w) && !call.sharding && col.numel() > 0;
  const Tensor& amax = is_of_rows ? col : row;
  if (amax.numel() == 0) return {};
  bridge::check_memory_if_real(kGroupedMm, "weight_operands", amax);
  return is_of_rows ? amax.clone() : amax_of_both(recipe, kFpropW, kDgradW, amax);
}

// Returns W, the transpose of B, in both directions: quantized here, or by the caller. Where
// backward quantizes W again, the columnwise direction has its amax alone.
Directions weight_operands_of(const GroupedCall& call, const Tensor& b, at::ScalarType dtype,
                              const Needed& row, const Needed& col, bool casts_later,
                              PendingAmaxes& pending) {
  const PreparedRecipe& recipe = call.recipe;
  ModuleState state = state_of(call, Tensor(), &pending);
  if (call.amax.defined()) state.amax = call.amax;
  const bool has_codes = !call.weight_operands.empty();
  const bool reads_weight = !has_codes || (row.is_needed && recipe.specs[kFpropW].is_bf16()) ||
                            (col.is_needed && recipe.specs[kDgradW].is_bf16());
  if (reads_weight) bridge::check_memory_if_real(kGroupedMm, "B", b);
  const Tensor w = transposed_matrices(reads_weight ? to_dtype(b, dtype) : b);
  state.casts_other_later = casts_later || call.keeps_amax;
  if (casts_later) return quantize_expert_weights(recipe, w, row, {kDgradW, false}, state);
  const Directions out =
      has_codes ? prequantized_both(recipe, kGroupedMm, "weight_operands", call.weight_operands, w,
                                    w.sym_size(1), row, col, w.sym_size(0))
                : quantize_expert_weights(recipe, w, row, col, state);
  if (has_codes) record_amaxes(recipe, row, col, state, out, call.sharding.has_value());
  // Also of codes: a checkpoint's second forward may read some where the first cast W.
  if (call.keeps_amax) *call.keeps_amax = has_codes ? kept_amax_of_codes(call, w) : out.second.amax;
  return out;
}

// Returns W as dgrad reads it, from its three saved tensors: codes, or B itself, which is quantized
// again.
ProductInput saved_weight_of(const GroupedCall& call, const PlannedProduct& dgrad, const Tensor& b,
                             const Tensor& scale, const Tensor& amax, at::ScalarType dtype) {
  const PreparedRecipe& recipe = call.recipe;
  // A checkpoint's second forward may save codes where the first saved B, or B where codes.
  if (recipe.recipe.dgrad.b.is_bf16() || !b.is_floating_point())
    return cast_input(recipe.specs[kDgradW], b, scale, amax);
  const Needed col{kDgradW, true, dgrad.reads_values()};
  ModuleState state = state_of(call, Tensor(), nullptr);
  if (amax.defined()) state.amax = amax;
  const Tensor w = transposed_matrices(to_dtype(b, dtype));
  const Directions out = quantize_expert_weights(recipe, w, {kFpropW, false}, col, state);
  return product_input(recipe, out.second, col);
}

// Returns an operand's amax where its codes have one; undefined: they have none.
Tensor amax_of_codes(const Spec& spec, const QuantizedOperand& operand) {
  return spec.has_tensor_amax() || spec.has_row_amax() ? operand.amax : Tensor();
}
// Returns an operand as backward reads it after it was saved: without its values.
ProductInput as_saved(const PreparedRecipe& recipe, Place place, const QuantizedOperand& operand) {
  const Spec& spec = recipe.specs[place];
  return cast_input(spec, operand.codes, operand.scale, amax_of_codes(spec, operand));
}

// Casts A and W, or takes their operands from the caller, and returns y. saved: what backward
// reads, which is A as wgrad reads it and W as dgrad reads it, three tensors each, the table, and
// the numbers of the rows.
Tensor operands_and_product(const Tensor& a, const Tensor& b, const Tensor& offs,
                            const GroupedCall& call, const GroupedNeeds& needs,
                            variable_list* saved) {
  const PreparedRecipe& recipe = call.recipe;
  const PlannedProduct fprop =
      plan_product(recipe.recipe.fprop, recipe.fprop, a.device(), /*is_grouped=*/true);
  const bool exact = fprop.reads_values();
  // An exact product decodes codes that come without their values.
  const bool has_values = call.a_operands.size() < 4 || call.a_operands[3].dim() > 1;
  // Of operands that the caller quantized, only sizes and dtype are read.
  const Tensor matrix = call.a_operands.empty() ? as_matrix(kGroupedMm, "A", a) : a;
  const Tensor table = table_of(call, offs, a.sym_size(0));
  const SymInt k = a.sym_size(1);

  PendingAmaxes pending;
  const Needed a_row{kFpropX, true, exact && has_values}, a_col{kWgradX, needs.db};
  const Directions of_a =
      input_operands_of(call, call.a_operands, matrix, table, a_row, a_col, pending);

  const Needed w_row{kFpropW, true, exact && call.weight_operands.empty()},
      w_col{kDgradW, needs.da};
  const bool casts_later = saved && needs.da && call.recomputes_weights &&
                           call.weight_operands.empty() && !recipe.recipe.dgrad.b.is_bf16();
  const Directions w =
      weight_operands_of(call, b, a.scalar_type(), w_row, w_col, casts_later, pending);

  const auto save = [&](const QuantizedOperand& operand, Place place) {
    if (saved)
      saved->insert(saved->end(),
                    {operand.codes, operand.scale, amax_of_codes(recipe.specs[place], operand)});
  };
  save(of_a.second, kWgradX);
  save(casts_later ? QuantizedOperand{b, Tensor(), w.second.amax, Tensor()} : w.second, kDgradW);
  if (saved) saved->insert(saved->end(), {table, only(call.row_ids).value_or(Tensor())});

  const auto input = [&](const QuantizedOperand& operand, const Needed& needed, bool is_cast) {
    return is_cast ? product_input(recipe, operand, needed)
                   : prequantized_input(recipe, operand, needed);
  };
  Tensor y = scaled_mm(fprop, input(of_a.first, a_row, call.a_operands.empty()),
                       input(w.first, w_row, call.weight_operands.empty()), k, only(call.bias),
                       call.out_dtype, {table, 0}, call.zeroes_tail);
  record(pending);
  return y;
}

GroupedState backward_state(const Tensor& a, const Tensor& b, at::TensorList bias,
                            const GroupedCall& call, const GroupedNeeds& needs) {
  return {.recipe = call.recipe,
          .a_dtype = a.scalar_type(),
          .b_dtype = b.scalar_type(),
          .bias_dtype = bias.empty() ? at::kFloat : bias[0].scalar_type(),
          .stream = call.stream,
          .first_expert = call.first_expert,
          .zeroes_tail = call.zeroes_tail,
          .has_bias = !bias.empty(),
          .rows = a.sym_size(0),
          .n = b.sym_size(2),
          .needs = needs,
          .history = call.history.vec(),
          .rng = call.rng.vec(),
          .sharding = call.sharding};
}

// Returns the amax of each group, from those of its columns. NaN is the largest by its bits.
Tensor largest_of_groups(const Tensor& of_columns) {
  if (of_columns.sym_size(1) == 0) return of_columns.sum(1);
  return of_columns.view(at::kInt).amax(1).view(at::kFloat);
}

// Sets the amaxes that the gradient's casts take, from those of its rows and of its columns.
void set_gradient_amaxes(const GroupedCall& call, ModuleState& state) {
  if (!call.g_amax_of_rows.defined()) return;
  Tensor of_groups;
  const auto amax_for = [&](Place place, const Tensor& of_lines) -> std::optional<Tensor> {
    const Spec& spec = call.recipe.specs[place];
    if (has_amax_of_values(spec)) {
      if (!of_groups.defined()) of_groups = largest_of_groups(call.g_amax_of_columns);
      return of_groups;
    }
    return spec.has_row_amax() && spec.transform == 0 ? std::optional(of_lines) : std::nullopt;
  };
  state.amax_of_rowwise = amax_for(kDgradG, call.g_amax_of_rows);
  state.amax = amax_for(kWgradG, call.g_amax_of_columns);
}

// The gradient of a product as dgrad and wgrad read it, and what they return. The codes of a
// direction are freed with the product that reads them.
class GradientOfGroups {
 public:
  GradientOfGroups(const GroupedState& s, const GroupedCall& call, const Tensor& table, Tensor grad)
      : s_(s),
        table_(table),
        dgrad_(plan_product(s.recipe.recipe.dgrad, s.recipe.dgrad, grad.device(), true)),
        wgrad_(plan_product(s.recipe.recipe.wgrad, s.recipe.wgrad, grad.device(), true)) {
    const bool has_codes = !call.g_operands.empty();
    row_ = {kDgradG, s.needs.da, dgrad_.reads_values() && !has_codes};
    col_ = {kWgradG, s.needs.db, wgrad_.reads_values()};
    const Tensor g = as_matrix(kGroupedMm, "gradient", to_dtype(grad, s.a_dtype));
    grad.reset();
    ModuleState of_rows = state_of(call, table, nullptr);
    of_rows.groups.rows_from = s.grad_rows_from;
    set_gradient_amaxes(call, of_rows);
    of_g_ = quantize_both(s.recipe, g, {kDgradG, row_.is_needed && !has_codes, row_.decoded}, col_,
                          of_rows);
    if (has_codes)
      of_g_.first = prequantized_both(s.recipe, kGroupedMm, "g_operands", call.g_operands, g,
                                      s.rows, row_, {kWgradG, false}, table.sym_size(1) - 1)
                        .first;
    if (s.needs.dbias) bias_ = to_dtype(sum_of_groups(g, table), s.bias_dtype);
  }

  const PlannedProduct& dgrad() const { return dgrad_; }

  // Return the gradients that are needed; of_bias undefined where it is not.
  Tensor of_a(const ProductInput& w) {
    const QuantizedOperand g = std::exchange(of_g_.first, {});
    return scaled_mm(dgrad_, product_input(s_.recipe, g, row_), w, s_.n, std::nullopt, s_.a_dtype,
                     {table_, 0}, s_.zeroes_tail);
  }
  Tensor of_b(const ProductInput& a) {
    const QuantizedOperand g = std::exchange(of_g_.second, {});
    return scaled_mm(wgrad_, product_input(s_.recipe, g, col_), a, s_.rows, std::nullopt,
                     s_.b_dtype, {table_, wgrad_unit(s_.recipe)})
        .transpose(-2, -1);
  }
  Tensor of_bias() { return std::move(bias_); }

 private:
  const GroupedState& s_;
  const Tensor& table_;
  PlannedProduct dgrad_, wgrad_;
  Needed row_, col_;
  Directions of_g_;
  Tensor bias_;
};

struct SavedGroups : LayerState {
  explicit SavedGroups(GroupedState of) : LayerState(kGroupedMm, of.recipe), s(std::move(of)) {
    add_rng(s.rng);
    add_histories(s.history);
  }

  // Returns the gradients of a, b and the bias, where there is one.
  variable_list gradients(const variable_list& saved, const variable_list& grads) const override {
    variable_list out(s.has_bias ? 3 : 2);
    const Tensor& grad = grads[0];
    if (!grad.defined()) return out;
    const PreparedRecipe& recipe = s.recipe;
    const Tensor &table = saved[6], &row_ids = saved[7];
    const variable_list ids = row_ids.defined() ? variable_list{row_ids} : variable_list{};
    const GroupedCall call{.recipe = recipe,
                           .out_dtype = s.a_dtype,
                           .stream = s.stream,
                           .first_expert = s.first_expert,
                           .zeroes_tail = s.zeroes_tail,
                           .bias = {},
                           .rng = s.rng,
                           .row_ids = ids,
                           .history = s.history,
                           .a_operands = {},
                           .weight_operands = {},
                           .sharding = s.sharding};
    GradientOfGroups g(s, call, table, grad);
    if (s.needs.da)
      out[0] = g.of_a(saved_weight_of(call, g.dgrad(), saved[3], saved[4], saved[5], s.a_dtype));
    if (s.needs.db)
      out[1] = g.of_b(cast_input(recipe.specs[kWgradX], saved[0], saved[1], saved[2]));
    if (s.needs.dbias) out[2] = g.of_bias();
    return out;
  }

  GroupedState s;
};

}  // namespace

namespace torch_ops {

Tensor multiply_groups(const Tensor& a, const Tensor& b, const Tensor& offs,
                       const GroupedCall& call) {
  check_call(a, b, offs, call);
  check_no_tangent(kGroupedMm, "A", a);
  check_no_tangent(kGroupedMm, "B", b);
  for (const Tensor& bias : call.bias) check_no_tangent(kGroupedMm, "bias", bias);
  const bool on = at::GradMode::is_enabled();
  const GroupedNeeds needs{on && a.requires_grad(), on && b.requires_grad(),
                           on && !call.bias.empty() && call.bias[0].requires_grad()};
  if (!needs.da && !needs.db && !needs.dbias) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return operands_and_product(a, b, offs, call, needs, nullptr);
  }
  const auto forward = [&]() -> ForwardResult {
    variable_list saved;
    Tensor y = operands_and_product(a, b, offs, call, needs, &saved);
    return {{std::move(y)},
            std::move(saved),
            c10::make_intrusive<SavedGroups>(backward_state(a, b, call.bias, call, needs))};
  };
  return differentiate(joined({a, b, call.bias}), forward).front();
}

bool takes_gradient_amaxes(const PreparedRecipe& recipe) {
  const Spec &row = recipe.specs[kDgradG], &col = recipe.specs[kWgradG];
  return finds_amaxes_of_columns(row, col) || has_amax_of_values(row) || has_amax_of_values(col);
}

GroupedGradients group_gradients(Tensor grad, const Tensor& a, const Tensor& b, const Tensor& offs,
                                 const GroupedCall& call, const std::array<bool, 3>& needed,
                                 const std::optional<Tensor>& rows_from, const TakeGradient& take) {
  check_call(a, b, offs, call);
  bridge::check_value_dtype(kGroupedMm, "grad", grad);
  bridge::check_memory_if_real(kGroupedMm, "grad", grad);
  TORCH_CHECK_VALUE(grad.dim() == 2 &&
                        (rows_from ? rows_from->sym_numel() : grad.sym_size(0)) == a.sym_size(0) &&
                        grad.sym_size(1) == b.sym_size(2) && grad.device() == a.device(),
                    kGroupedMm, ": expected grad (", a.sym_size(0), ", ", b.sym_size(2), ") on ",
                    a.device(), ", got ", grad.sym_sizes(), " on ", grad.device());
  for (const Place place : {kDgradG, kWgradG})
    TORCH_CHECK_VALUE(!rows_from || !(needed[2] || call.recipe.specs[place].is_bf16()), kGroupedMm,
                      ": expected grad_rows_from of a quantized gradient, got bf16 or a bias");
  TORCH_CHECK_VALUE(!call.bias.empty() || !needed[2], kGroupedMm,
                    ": expected bias, whose gradient is needed, got none");
  const at::AutoDispatchBelowADInplaceOrView below;
  const GroupedNeeds needs{needed[0], needed[1], needed[2]};
  GroupedState state = backward_state(a, b, call.bias, call, needs);
  state.grad_rows_from = rows_from;
  const Tensor table = table_of(call, offs, a.sym_size(0));
  PendingAmaxes pending;
  // The gradient's cast may write a history, so what the caller gave is checked before.
  Directions w;
  if (needs.da)
    w = weight_operands_of(call, b, a.scalar_type(), {kFpropW, false}, {kDgradW, true}, false,
                           pending);
  const auto cast_of_a = [&](const Rows& rows) {
    const Tensor matrix = rows.operands.empty() ? as_matrix(kGroupedMm, "A", rows.values) : a;
    return as_saved(call.recipe, kWgradX,
                    input_operands_of(call, rows.operands, matrix, table, {kFpropX, false},
                                      {kWgradX, true}, pending)
                        .second);
  };
  std::optional<ProductInput> of_a;
  if (needs.db && !take) of_a = cast_of_a({a, call.a_operands.vec()});
  GradientOfGroups g(state, call, table, std::move(grad));
  GroupedGradients out;
  if (needs.da) out.a = g.of_a(as_saved(call.recipe, kDgradW, std::exchange(w.second, {})));
  if (take) {
    const Rows rows = take(std::move(out.a));
    if (needs.db) of_a = cast_of_a(rows);
  }
  if (needs.db) out.b = g.of_b(*of_a);
  out.bias = g.of_bias();
  record(pending);
  return out;
}

}  // namespace torch_ops

}  // namespace minifloat
