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
// does (grouped_mlp.cpp). torch.compile records the cast of A and an op each way (layer_ops.h).
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "layers/grouped_call.h"
#include "layers/layer_ops.h"
#include "layers/layer_state.h"
#include "layers/operands.h"
#include "layers/passes.h"
#include "layers/recorded_args.h"
#include "ops/bridge.h"
#include "ops/op.h"
#include "ops/ops.h"

namespace minifloat {
namespace {

using namespace torch_ops;
using variable_list = std::vector<Tensor>;

// Returns the table of A's groups.
Tensor table_of(const GroupedCall& call, const Tensor& offs, const SymInt& rows) {
  return call.table.defined() ? call.table : group_table(kGroupedMm, offs, rows);
}

// Returns the call as one layer, without the table of groups. It refers to b and the call.
Layers layer_of(const GroupedCall& call, const Tensor& b) {
  RowGroups groups{.table = {}, .first_expert = call.first_expert, .zeroes_tail = call.zeroes_tail};
  if (!call.row_ids.empty()) groups.row_ids = call.row_ids[0];
  return {.weights = b,
          .biases = call.bias,
          .bias_index = {call.bias.empty() ? -1 : 0},
          .rng = call.rng,
          .histories = call.history,
          .streams = call.stream,
          .recomputes_weights = call.recomputes_weights,
          .prequantized = {call.a_operands, call.weight_operands},
          .shards = {call.sharding ? &*call.sharding : nullptr},
          .groups = std::move(groups)};
}

ForwardPass pass_of(const GroupedCall& call, const Layers& layer, const NeededGradients& needs,
                    const Tensor& a, variable_list* saved) {
  return {.prepared = call.recipe,
          .layers = layer,
          .needs = needs,
          .dtype = a.scalar_type(),
          .out_dtype = call.out_dtype,
          .k = a.sym_size(1),
          .saved = saved,
          .keeps_amax = call.keeps_amax};
}

// Returns the amax of each group, from those of its columns. NaN is the largest by its bits.
Tensor largest_of_groups(const Tensor& of_columns) {
  if (of_columns.sym_size(1) == 0) return of_columns.sum(1);
  return of_columns.view(at::kInt).amax(1).view(at::kFloat);
}

// The gradient of y, and what the caller found of it; see GroupedCall.
struct GivenGradient {
  Tensor values;
  at::TensorList operands = {};
  Tensor amax_of_rows = {}, amax_of_columns = {};
  std::optional<Tensor> rows_from = {};  // the row of values of each row of y; none: its own
};

// Sets the amaxes that the gradient's casts take, from those of its rows and of its columns.
void set_gradient_amaxes(const PreparedRecipe& recipe, const GivenGradient& g, CastContext& state) {
  if (!g.amax_of_rows.defined()) return;
  Tensor of_groups;
  const auto amax_for = [&](Place place, const Tensor& of_lines) -> std::optional<Tensor> {
    const Spec& spec = recipe.specs[place];
    if (has_amax_of_values(spec)) {
      if (!of_groups.defined()) of_groups = largest_of_groups(g.amax_of_columns);
      return of_groups;
    }
    return spec.has_row_amax() && spec.transform == 0 ? std::optional(of_lines) : std::nullopt;
  };
  state.amax_of_rowwise = amax_for(kDgradG, g.amax_of_rows);
  state.amax = amax_for(kWgradG, g.amax_of_columns);
}

// The gradient of a product as dgrad and wgrad read it, and what they return. The codes of a
// direction are freed with the product that reads them.
class GradientOfGroups {
 public:
  // rows: of y
  GradientOfGroups(const SavedLayers& layer, const NeededGradients& needs, GivenGradient given,
                   SymInt rows)
      : layer_(layer), rows_(std::move(rows)), device_(given.values.device()) {
    const PreparedRecipe& recipe = layer.recipe;
    const Tensor& table = layer.groups->table;
    const bool has_codes = !given.operands.empty();
    row_ = {kDgradG, needs.dx, layer.dgrad(device_).reads_values() && !has_codes};
    col_ = {kWgradG, needs.any_dw, layer.wgrad(device_).reads_values()};
    const Tensor g = as_matrix(kGroupedMm, "gradient", to_dtype(given.values, layer.x_dtype));
    given.values.reset();
    QuantizedOperand codes;
    if (has_codes)
      codes = prequantized_both(recipe, kGroupedMm, "g_operands", given.operands, g, rows_, row_,
                                {kWgradG, false}, table.sym_size(1) - 1)
                  .first;
    CastContext state = layer.state_of_rows(0);
    state.groups.rows_from = given.rows_from;
    set_gradient_amaxes(recipe, given, state);
    of_g_ = quantize_both(recipe, g, {kDgradG, row_.is_needed && !has_codes, row_.decoded}, col_,
                          state);
    if (has_codes) of_g_.first = std::move(codes);
    if (!needs.db.empty() && needs.db[0]) bias_ = bias_gradient(layer, 0, g);
  }

  // Return the gradients that are needed; of_bias undefined where it is not.
  Tensor of_a(const ProductInput& w) {
    const QuantizedOperand g = std::exchange(of_g_.first, {});
    return input_gradient(layer_, g, row_, w, layer_.features[0][0], layer_.x_dtype, device_);
  }
  Tensor of_b(const ProductInput& a) {
    const QuantizedOperand g = std::exchange(of_g_.second, {});
    return weight_gradient(layer_, 0, g, col_, a, rows_, device_, 1);
  }
  Tensor of_bias() { return std::move(bias_); }

 private:
  const SavedLayers& layer_;
  SymInt rows_;
  at::Device device_;
  OperandUse row_, col_;
  Directions of_g_;
  Tensor bias_;
};

// Reads A and W, three saved tensors each, the table of groups and the numbers of the rows.
struct SavedGroups : LayerState {
  SavedGroups(const Tensor& a, const Layers& of, const PreparedRecipe& recipe,
              NeededGradients needed)
      : LayerState(kGroupedMm, recipe),
        layer(of, recipe, a.scalar_type()),
        needs(std::move(needed)) {
    layer.groups->table.reset();
    layer.groups->row_ids.reset();
    add_rng(layer.rng);
    add_histories(layer.histories);
  }

  // Returns the gradients of a, b and the bias, where there is one.
  variable_list gradients(const variable_list& saved, const variable_list& grads) const override {
    variable_list out(2 + layer.bias_dtypes.size());
    if (!grads[0].defined()) return out;
    SavedLayers of = layer;
    of.groups->table = saved[6];
    if (saved[7].defined()) of.groups->row_ids = saved[7];
    if (records_backward(of, grads)) {
      LayerGradients d = record_backward(of, needs, 0, grads[0], saved);
      out[0] = std::move(d.x), out[1] = std::move(d.weight);
      if (out.size() > 2) out[2] = std::move(d.bias);
      return out;
    }
    GradientOfGroups g(of, needs, {grads[0]}, grads[0].sym_size(0));
    if (needs.dx) out[0] = g.of_a(saved_weight(of, saved, 0));
    if (needs.any_dw) out[1] = g.of_b(saved_input(of, saved, 0, kWgradX));
    if (out.size() > 2) out[2] = g.of_bias();
    return out;
  }

  SavedLayers layer;
  NeededGradients needs;
};

}  // namespace

namespace torch_ops {

Tensor multiply_groups(const Tensor& a, const Tensor& b, const Tensor& offs,
                       const GroupedCall& call) {
  check_call(a, b, offs, call);
  check_no_tangent(kGroupedMm, "A", a);
  check_no_tangent(kGroupedMm, "B", b);
  for (const Tensor& bias : call.bias) check_no_tangent(kGroupedMm, "bias", bias);
  Layers layer = layer_of(call, b);
  const NeededGradients needs(a, layer);
  const auto multiply = [&](variable_list* saved) {
    layer.groups->table = table_of(call, offs, a.sym_size(0));
    Tensor y = multiply_by_weights(pass_of(call, layer, needs, a, saved), kGroupedMm, a).front();
    if (saved)
      saved->insert(saved->end(), {layer.groups->table, layer.groups->row_ids.value_or(Tensor())});
    return y;
  };
  if (!needs.any()) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return multiply(nullptr);
  }
  const auto forward = [&]() -> ForwardResult {
    variable_list saved;
    Tensor y = multiply(&saved);
    return {{std::move(y)},
            std::move(saved),
            c10::make_intrusive<SavedGroups>(a, layer, call.recipe, needs)};
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
  NeededGradients needs;
  needs.dx = needed[0], needs.any_dw = needed[1], needs.dw = {needed[1]}, needs.db = {needed[2]};
  Layers layer = layer_of(call, b);
  layer.groups->table = table_of(call, offs, a.sym_size(0));
  SavedLayers read(layer, call.recipe, a.scalar_type());
  read.product_dtypes = read.weight_dtypes;  // autocast casts no matrix of the experts' op
  const auto cast_of_a = [&](const Rows& rows) {
    Layers of_rows = layer;
    of_rows.prequantized.x = rows.operands;
    const ForwardPass pass = pass_of(call, of_rows, needs, rows.values, nullptr);
    return backward_input(
        read,
        input_operands(pass, kGroupedMm, rows.values, {kFpropX, false}, {kWgradX, true}).second,
        kWgradX);
  };
  // A cast writes a history, so what the caller gave is checked before.
  std::optional<ProductInput> of_a;
  const bool reads_a = needs.any_dw && !take, has_codes = !call.a_operands.empty();
  if (reads_a && has_codes) of_a = cast_of_a({a, call.a_operands.vec()});
  if (reads_a && !has_codes) bridge::check_memory_if_real(kGroupedMm, "A", a);
  Directions w;
  if (needs.dx)
    w = weight_operands(pass_of(call, layer, needs, a, nullptr), 0, {kFpropW, false},
                        {kDgradW, true}, /*casts_later=*/false, call.amax);
  if (reads_a && !has_codes) of_a = cast_of_a({a, {}});
  GradientOfGroups g(
      read, needs,
      {std::move(grad), call.g_operands, call.g_amax_of_rows, call.g_amax_of_columns, rows_from},
      a.sym_size(0));
  GroupedGradients out;
  if (needs.dx) out.a = g.of_a(backward_input(read, std::exchange(w.second, {}), kDgradW));
  if (take) {
    const Rows rows = take(std::move(out.a));
    if (needs.any_dw) of_a = cast_of_a(rows);
  }
  if (needs.any_dw) out.b = g.of_b(*of_a);
  out.bias = g.of_bias();
  return out;
}

}  // namespace torch_ops

}  // namespace minifloat
