#include "layers/layer_ops.h"

#include <ATen/ATen.h>

#include <array>
#include <tuple>

#include "layers/recorded_args.h"
#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/op.h"
#include "ops/outputs.h"

namespace minifloat::torch_ops {
namespace {

using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

// ---- forward ------------------------------------------------------------------------------------

// Returns the groups of experts; none: a dense layer.
std::optional<RowGroups> groups_of(const std::optional<Tensor>& table,
                                   const std::optional<Tensor>& row_ids, std::int64_t first_expert,
                                   bool zero_tail) {
  if (!table) return std::nullopt;
  return RowGroups{*table, row_ids, first_expert, zero_tail};
}

// Returns what check_call reads of experts.
GroupedCall call_of(const PreparedRecipe& recipe, at::ScalarType out_dtype, const RowGroups& groups,
                    at::TensorList bias, at::TensorList rng, at::TensorList history) {
  return {.recipe = recipe,
          .out_dtype = out_dtype,
          .stream = 0,
          .first_expert = groups.first_expert,
          .zeroes_tail = groups.zeroes_tail,
          .bias = bias,
          .rng = rng,
          .row_ids = list_of(groups.row_ids),
          .history = history,
          .a_operands = {},
          .weight_operands = {},
          .table = groups.table};
}

FourTensors linear_forward(const Tensor& x_codes, const Tensor& x_scale, const Tensor& x_amax,
                           const Tensor& x_decoded, const Tensor& weight,
                           const std::optional<Tensor>& bias, const std::string& recipe,
                           at::ScalarType dtype, bool needs_dx, const std::string& recompute,
                           const std::optional<Tensor>& rng, const std::optional<Tensor>& history,
                           std::int64_t stream, bool swizzled,
                           std::optional<at::ScalarType> out_dtype,
                           const std::optional<Tensor>& table, const std::optional<Tensor>& row_ids,
                           std::int64_t first_expert, bool zero_tail) {
  constexpr const char* kOp = "linear_forward";
  const PreparedRecipe& prepared = prepare(recipe);
  check_recipe(kOp, prepared);
  TORCH_CHECK_VALUE(weight.dim() == (table ? 3 : 2), kOp, ": expected weight ",
                    table ? "(E, K, N)" : "(N, K)", ", got ", weight.sym_sizes());
  check_dtype(kOp, "dtype", dtype);
  check_dtype(kOp, "out_dtype", out_dtype.value_or(dtype));
  const Layers layers = {.weights = weight,
                         .biases = list_of(bias),
                         .bias_index = {bias ? 0 : -1},
                         .rng = list_of(rng),
                         .histories = list_of(history),
                         .streams = stream,
                         .recomputes_weights = recomputes_weights(kOp, recompute),
                         .prequantized = {},
                         .shards = {},
                         .groups = groups_of(table, row_ids, first_expert, zero_tail)};
  const SymInt k = layers.features_of(0)[1];
  std::optional<SymInt> experts;
  if (table) experts = weight.sym_size(0);
  const QuantizedOperand x =
      checked_x(kOp, prepared, {x_codes, x_scale, x_amax, x_decoded}, weight, k, experts);
  // Of x only its shape is known. Both check the state too.
  if (table)
    check_groups_of_call(kOp,
                         call_of(prepared, out_dtype.value_or(dtype), *layers.groups, layers.biases,
                                 layers.rng, layers.histories),
                         x_codes.sym_size(0), weight);
  else
    check_layers(empty_result(weight, {0, k}, dtype), layers, prepared);
  const NeededGradients needs(needs_dx);
  std::vector<Tensor> saved;
  const ForwardPass pass = {.prepared = prepared,
                            .layers = layers,
                            .needs = needs,
                            .dtype = dtype,
                            .out_dtype = out_dtype.value_or(dtype),
                            .k = k,
                            .saved = &saved,
                            .returns_saved = true,
                            .returns_swizzled = swizzled};
  const Tensor y =
      multiply_operand(pass, x, {.place = kFpropX, .decoded = is_decoded(x.decoded)}).front();
  if (saves_weight_itself(pass)) saved[0] = saved[1] = Tensor();  // which the caller has
  return {y, or_empty(&saved[0], weight), or_empty(&saved[1], weight), or_empty(&saved[2], weight)};
}

// Under delayed scaling the ops write to a history, and are ops of their own: a trace treats an op
// that may write as one that does.
const Op linear_forward_op("linear_forward", linear_forward, without_derivative()),
    linear_forward_delayed_op("linear_forward_delayed", linear_forward, without_derivative());

// ---- backward -----------------------------------------------------------------------------------

ThreeTensors linear_backward(const Tensor& grad, at::TensorList saved, const std::string& recipe,
                             std::array<bool, 3> needed, c10::SymInt k, at::ScalarType x_dtype,
                             at::ScalarType product_dtype, at::ScalarType weight_dtype,
                             std::optional<at::ScalarType> bias_dtype,
                             const std::optional<Tensor>& rng, const std::optional<Tensor>& history,
                             std::int64_t stream, const std::optional<Tensor>& table,
                             const std::optional<Tensor>& row_ids, std::int64_t first_expert,
                             bool zero_tail) {
  constexpr const char* kOp = "linear_backward";
  const auto& [needs_dx, needs_dw, needs_db] = needed;
  const PreparedRecipe& prepared = prepare(recipe);
  bridge::check_value_dtype(kOp, "grad", grad);
  TORCH_CHECK_VALUE(grad.dim() >= 1 && k >= 0, kOp, ": expected grad (…, N) and K, got ",
                    grad.sym_sizes(), " and ", k);
  TORCH_CHECK_VALUE(saved.size() == 6, kOp, ": expected six saved tensors, got ", saved.size());
  TORCH_CHECK_VALUE(!needs_db || bias_dtype, kOp, ": expected a dtype of the bias, got none");
  for (const at::ScalarType dtype :
       {x_dtype, product_dtype, weight_dtype, bias_dtype.value_or(x_dtype)})
    check_dtype(kOp, "dtypes", dtype);
  bridge::check_same_device(kOp, "saved", saved, grad);
  bridge::check_memory_if_real(kOp, "grad", grad);
  for (const Tensor& t : saved) bridge::check_memory_if_real(kOp, "saved", t);
  SavedLayers layers(prepared, x_dtype);
  layers.groups = groups_of(table, row_ids, first_expert, zero_tail);
  // The gradients of experts are rounded to x's dtype before the cast.
  const Tensor g = as_matrix("linear", "gradient", table ? to_dtype(grad, x_dtype) : grad);
  const SymInt m = g.sym_size(0), n = g.sym_size(1);
  std::optional<SymInt> experts;
  if (table) {
    TORCH_CHECK_VALUE(table->dim() == 2, kOp, ": expected groups as group_table returns them");
    experts = table->sym_size(1) - 1;
    const Tensor b = empty_result(grad, {1, 1, 1}, x_dtype).expand_symint({*experts, k, n});
    check_groups_of_call(
        kOp, call_of(prepared, x_dtype, *layers.groups, {}, list_of(rng), list_of(history)), m, b);
  } else {
    check_state(kOp, prepared, rng, history, grad);
  }
  if (needs_dw)
    check_saved_x(kOp, "the saved x", prepared, saved, m, k,
                  table ? Groups{table, wgrad_unit(prepared)} : Groups{});
  if (needs_dx) check_saved_weight(kOp, prepared, saved.slice(3), n, k, experts);
  const Tensor none = or_empty(nullptr, grad);
  if (grad.is_meta()) {  // the products need no check that forward's have not passed
    c10::SymDimVector of_w = {n, k}, of_bias = {n};
    if (experts) of_w = {*experts, n, k}, of_bias = {*experts, n};
    const Tensor dw = needs_dw ? empty_result(g, of_w, weight_dtype) : none;
    return {needs_dx ? empty_result(g, {m, k}, g.scalar_type()) : none,
            needs_dw && experts ? dw.transpose(-2, -1) : dw,
            needs_db ? empty_result(g, of_bias, *bias_dtype) : none};
  }
  layers.streams = {stream};
  layers.product_dtypes = {product_dtype};
  layers.weight_dtypes = {weight_dtype};
  if (bias_dtype) layers.bias_dtypes = {*bias_dtype};
  layers.bias_index = {bias_dtype ? 0 : -1};
  layers.features = {{n, k}};
  if (rng) layers.rng = {*rng};
  if (history) layers.histories = {*history};
  NeededGradients needs(needs_dx);
  needs.any_dw = needs_dw;
  needs.dw = {needs_dw};
  needs.db = {needs_db};
  std::vector<Tensor> tensors;
  for (const Tensor& t : saved) tensors.push_back(or_undefined(t));
  ProductInput x = saved_input(layers, tensors, 0, kWgradX);
  const LayerGradients d = linear_gradients(layers, needs, 0, g, x, tensors);
  return {or_empty(&d.x, grad), or_empty(&d.weight, grad), or_empty(&d.bias, grad)};
}

const Op linear_backward_op("linear_backward", linear_backward, without_derivative()),
    linear_backward_delayed_op("linear_backward_delayed", linear_backward, without_derivative());

// The arguments of both ops that say how the rows of experts lie.
struct GroupArguments {
  explicit GroupArguments(const std::optional<RowGroups>& groups) {
    if (!groups) return;
    table = groups->table, row_ids = groups->row_ids;
    first_expert = groups->first_expert, zero_tail = groups->zeroes_tail;
  }

  std::optional<Tensor> table, row_ids;
  std::int64_t first_expert = 0;
  bool zero_tail = true;
};

}  // namespace

std::vector<Tensor> record_forward(const ForwardPass& pass, const QuantizedOperand& x) {
  const Layers& layers = pass.layers;
  const bool saves_itself = saves_weight_itself(pass);
  const GroupArguments of(layers.groups);
  std::vector<Tensor> outputs;
  for (std::size_t i = 0; i < layers.weights.size(); ++i) {
    const Tensor& weight = layers.weights[i];
    const CastContext state = pass.state_of(i);
    const auto& op = layers.histories.empty() ? linear_forward_op : linear_forward_delayed_op;
    auto [y, codes, scale, amax] = op(
        x.codes, x.scale, or_empty(&x.amax, x.codes), x.decoded, weight, layers.bias_of(i),
        pass.prepared.text, pass.dtype, pass.saved && pass.needs.dx, saves_itself ? "weight" : "",
        or_none(state.rng), or_none(state.history), state.stream, returns_swizzled(pass, i),
        pass.out_dtype, of.table, of.row_ids, of.first_expert, of.zero_tail);
    outputs.push_back(std::move(y));
    amax = or_undefined(amax);
    if (saves_itself)
      pass.save({weight, Tensor(), amax, Tensor()}, kDgradW);
    else
      pass.save({codes, scale, amax, Tensor()}, kDgradW);
  }
  return outputs;
}

LayerGradients record_backward(const SavedLayers& layers, const NeededGradients& needs,
                               std::size_t i, const Tensor& grad,
                               const std::vector<Tensor>& saved) {
  std::vector<Tensor> tensors;
  for (const std::size_t first : {std::size_t{0}, 3 * (i + 1)})  // of x, and of weight i
    for (std::size_t j = first; j < first + 3; ++j) tensors.push_back(or_empty(&saved[j], grad));
  const int bias = layers.bias_index[i];
  const bool needs_db = bias >= 0 && needs.db[static_cast<std::size_t>(bias)];
  const CastContext state = layers.state_of(i);
  std::optional<at::ScalarType> bias_dtype;
  if (bias >= 0) bias_dtype = layers.bias_dtypes[static_cast<std::size_t>(bias)];
  const auto& op = layers.histories.empty() ? linear_backward_op : linear_backward_delayed_op;
  const GroupArguments of(layers.groups);
  const auto [dx, dw, db] =
      op(grad, tensors, layers.recipe.text, {needs.dx, needs.dw[i], needs_db},
         layers.features[i][1], layers.x_dtype, layers.product_dtypes[i], layers.weight_dtypes[i],
         bias_dtype, or_none(state.rng), or_none(state.history), state.stream, of.table, of.row_ids,
         of.first_expert, of.zero_tail);
  return {needs.dx ? dx : Tensor(), needs.dw[i] ? dw : Tensor(), needs_db ? db : Tensor()};
}

}  // namespace minifloat::torch_ops
