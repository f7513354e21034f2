#include "layers/layer_ops.h"

#include <ATen/ATen.h>

#include <array>
#include <tuple>

#include "layers/recorded_args.h"
#include "ops/bridge.h"
#include "ops/op.h"
#include "ops/outputs.h"

namespace minifloat::torch_ops {
namespace {

using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

// ---- forward ------------------------------------------------------------------------------------

FourTensors linear_forward(const Tensor& x_codes, const Tensor& x_scale, const Tensor& x_amax,
                           const Tensor& x_decoded, const Tensor& weight,
                           const std::optional<Tensor>& bias, const std::string& recipe,
                           at::ScalarType dtype, bool needs_dx, const std::string& recompute,
                           const std::optional<Tensor>& rng, const std::optional<Tensor>& history,
                           std::int64_t stream, bool swizzled) {
  constexpr const char* kOp = "linear_forward";
  const PreparedRecipe& prepared = prepare(recipe);
  check_recipe(kOp, prepared);
  TORCH_CHECK_VALUE(weight.dim() == 2, kOp, ": expected weight (N, K), got ", weight.sym_sizes());
  check_dtype(kOp, "dtype", dtype);
  const QuantizedOperand x =
      checked_x(kOp, prepared, {x_codes, x_scale, x_amax, x_decoded}, weight, weight.sym_size(1));
  const Layers layers = {.weights = weight,
                         .biases = list_of(bias),
                         .bias_index = {bias ? 0 : -1},
                         .rng = list_of(rng),
                         .histories = list_of(history),
                         .streams = stream,
                         .recomputes_weights = recomputes_weights(kOp, recompute),
                         .prequantized = {},
                         .shards = {}};
  // Of x only its shape is known. Checks the state too.
  check_layers(empty_result(weight, {0, weight.sym_size(1)}, dtype), layers, prepared);
  const NeededGradients needs(needs_dx);
  std::vector<Tensor> saved;
  const ForwardPass pass = {.prepared = prepared,
                            .layers = layers,
                            .needs = needs,
                            .dtype = dtype,
                            .out_dtype = dtype,
                            .k = weight.sym_size(1),
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
                             std::int64_t stream) {
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
  check_state(kOp, prepared, rng, history, grad);
  bridge::check_same_device(kOp, "saved", saved, grad);
  for (const Tensor& t : saved) bridge::check_memory_if_real(kOp, "saved", t);
  const Tensor g = as_matrix("linear", "gradient", grad);
  const SymInt m = g.sym_size(0), n = g.sym_size(1);
  if (needs_dw) check_saved_x(kOp, "the saved x", prepared, saved, m, k);
  if (needs_dx) check_saved_weight(kOp, prepared, saved.slice(3), n, k);
  const Tensor none = or_empty(nullptr, grad);
  if (grad.is_meta())  // the products need no check that forward's have not passed
    return {needs_dx ? empty_result(g, {m, k}, g.scalar_type()) : none,
            needs_dw ? empty_result(g, {n, k}, weight_dtype) : none,
            needs_db ? empty_result(g, {n}, *bias_dtype) : none};
  SavedLayers layers(prepared, x_dtype);
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
  const LayerGradients d = linear_gradients(layers, needs, 0, grad, x, tensors);
  return {or_empty(&d.x, grad), or_empty(&d.weight, grad), or_empty(&d.bias, grad)};
}

const Op linear_backward_op("linear_backward", linear_backward, without_derivative()),
    linear_backward_delayed_op("linear_backward_delayed", linear_backward, without_derivative());

}  // namespace

std::vector<Tensor> record_forward(const ForwardPass& pass, const QuantizedOperand& x) {
  const Layers& layers = pass.layers;
  const bool saves_itself = saves_weight_itself(pass);
  std::vector<Tensor> outputs;
  for (std::size_t i = 0; i < layers.weights.size(); ++i) {
    const Tensor& weight = layers.weights[i];
    const CastContext state = pass.state_of(i);
    const auto& op = layers.histories.empty() ? linear_forward_op : linear_forward_delayed_op;
    auto [y, codes, scale, amax] = op(
        x.codes, x.scale, or_empty(&x.amax, x.codes), x.decoded, weight, layers.bias_of(i),
        pass.prepared.text, pass.dtype, pass.saved && pass.needs.dx, saves_itself ? "weight" : "",
        or_none(state.rng), or_none(state.history), state.stream, returns_swizzled(pass, i));
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
  const auto [dx, dw, db] =
      op(grad, tensors, layers.recipe.text, {needs.dx, needs.dw[i], needs_db},
         layers.features[i][1], layers.x_dtype, layers.product_dtypes[i], layers.weight_dtypes[i],
         bias_dtype, or_none(state.rng), or_none(state.history), state.stream);
  return {needs.dx ? dx : Tensor(), needs.dw[i] ? dw : Tensor(), needs_db ? db : Tensor()};
}

}  // namespace minifloat::torch_ops
