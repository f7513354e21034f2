#include "layers/layer_ops.h"

#include <ATen/ATen.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <array>
#include <tuple>

#include "ops/op.h"
#include "ops/outputs.h"

namespace minifloat::torch_ops {
namespace {

using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

// Of the tensors of torch.func, which the ops within a layer have rules for.
constexpr c10::DispatchKeySet kFunctionTransforms({c10::DispatchKey::FuncTorchBatched,
                                                   c10::DispatchKey::FuncTorchGradWrapper});

// Returns whether AOTAutograd traces a call with t.
bool is_compiled(const Tensor& t) {
  using c10::impl::TorchDispatchModeTLS;
  return TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::FUNCTIONAL).has_value() &&
         !t.key_set().has_any(kFunctionTransforms);
}

// Returns what an op returned, or undefined where it is empty: what the op did not compute.
Tensor or_undefined(const Tensor& t) { return t.sym_numel() == 0 ? Tensor() : t; }

Tensor empty_result(const Tensor& like, c10::SymIntArrayRef shape, at::ScalarType dtype) {
  return at::empty_symint(shape, like.options().dtype(dtype));
}

// ---- forward ------------------------------------------------------------------------------------

FourTensors linear_forward(const Tensor& x_codes, const Tensor& x_scale, const Tensor& x_amax,
                           const Tensor& x_values, const Tensor& weight,
                           const std::optional<Tensor>& bias, const std::string& recipe,
                           at::ScalarType dtype, bool needs_dx, const std::string& recompute,
                           const std::optional<Tensor>& rng, const std::optional<Tensor>& history,
                           std::int64_t stream) {
  const PreparedRecipe& prepared = prepare(recipe);
  const Layers layers = {.weights = weight,
                         .biases = list_of(bias),
                         .bias_index = {bias ? 0 : -1},
                         .rng = list_of(rng),
                         .histories = list_of(history),
                         .streams = {stream},
                         .recomputes_weights = recomputes_weights("linear_forward", recompute),
                         .prequantized = {},
                         .shards = {}};
  const NeededGradients needs(needs_dx);
  std::vector<Tensor> saved;
  const ForwardPass pass = {.prepared = prepared,
                            .layers = layers,
                            .needs = needs,
                            .dtype = dtype,
                            .out_dtype = dtype,
                            .k = weight.sym_size(1),
                            .saved = &saved,
                            .returns_saved = true};
  const bool casts_later = needs_dx && layers.recomputes_weights;
  Tensor y;
  if (weight.is_meta()) {  // whose engines another device may not have
    pass.save(weight_operands(pass, 0, {kFpropW}, {kDgradW, needs_dx}, casts_later).second,
              kDgradW);
    y = empty_result(x_codes, {x_codes.sym_size(0), weight.sym_size(0)}, dtype);
  } else {
    const bool decoded = x_values.dim() == 2;
    y = multiply_operand(pass, {x_codes, x_scale, or_undefined(x_amax), x_values},
                         {.place = kFpropX, .decoded = decoded})
            .front();
  }
  if (casts_later) saved[0] = saved[1] = Tensor();  // W, which the caller has
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
  const auto& [needs_dx, needs_dw, needs_db] = needed;
  const Tensor g = as_matrix("linear", "gradient", grad);
  const SymInt n = g.sym_size(1);
  const Tensor none = or_empty(nullptr, grad);
  if (grad.is_meta())  // the products need no check that forward's have not passed
    return {needs_dx ? empty_result(g, {g.sym_size(0), k}, g.scalar_type()) : none,
            needs_dw ? empty_result(g, {n, k}, weight_dtype) : none,
            needs_db ? empty_result(g, {n}, *bias_dtype) : none};
  SavedLayers layers(prepare(recipe), x_dtype);
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

bool records_forward(const PreparedRecipe& recipe, const Layers& layers, const Tensor& t) {
  if (!is_compiled(t) || layers.shards.sharding || layers.groups ||
      !layers.prequantized.weight.empty())
    return false;
  // Else what backward reads of W is W itself, or what forward reads.
  return !recipe.reads_values(kFpropX) && !recipe.reads_values(kFpropW) &&
         !recipe.reads_values(kDgradW) && !recipe.keeps_codes(kFpropW);
}

std::vector<Tensor> record_forward(const ForwardPass& pass, const QuantizedOperand& x) {
  const Layers& layers = pass.layers;
  const auto at_or_none = [](at::TensorList list, std::size_t i) {
    return list.empty() ? std::nullopt : std::optional(list[i]);
  };
  const bool saves_itself = layers.recomputes_weights && pass.saved && pass.needs.dx;
  std::vector<Tensor> outputs;
  for (std::size_t i = 0; i < layers.weights.size(); ++i) {
    const Tensor& weight = layers.weights[i];
    const auto& op = layers.histories.empty() ? linear_forward_op : linear_forward_delayed_op;
    auto [y, codes, scale, amax] =
        op(x.codes, x.scale, or_empty(&x.amax, x.codes), x.decoded, weight, layers.bias_of(i),
           pass.prepared.text, pass.dtype, pass.saved && pass.needs.dx,
           saves_itself ? "weight" : "", at_or_none(layers.rng, i), at_or_none(layers.histories, i),
           layers.streams.empty() ? 0 : layers.streams[i]);
    outputs.push_back(std::move(y));
    amax = or_undefined(amax);
    if (saves_itself)
      pass.save({weight, Tensor(), amax, Tensor()}, kDgradW);
    else
      pass.save({codes, scale, amax, Tensor()}, kDgradW);
  }
  return outputs;
}

bool records_backward(const SavedLayers& layers, const std::vector<Tensor>& grads) {
  return grads.size() == 1 && grads[0].defined() && is_compiled(grads[0]) && !layers.sharding &&
         !layers.groups && !layers.accumulation.is_on();
}

LayerGradients record_backward(const SavedLayers& layers, const NeededGradients& needs,
                               const Tensor& grad, const std::vector<Tensor>& saved) {
  const auto first_or_none = [](const auto& list) {
    return list.empty() ? std::nullopt : std::optional(list[0]);
  };
  std::vector<Tensor> tensors;
  for (const Tensor& t : saved) tensors.push_back(or_empty(&t, grad));
  const bool needs_db = !needs.db.empty() && needs.db[0];
  const auto& op = layers.histories.empty() ? linear_backward_op : linear_backward_delayed_op;
  const auto [dx, dw, db] =
      op(grad, tensors, layers.recipe.text, {needs.dx, needs.any_dw, needs_db},
         layers.features[0][1], layers.x_dtype, layers.product_dtypes[0], layers.weight_dtypes[0],
         first_or_none(layers.bias_dtypes), first_or_none(layers.rng),
         first_or_none(layers.histories), layers.streams.empty() ? 0 : layers.streams[0]);
  return {needs.dx ? dx : Tensor(), needs.any_dw ? dw : Tensor(), needs_db ? db : Tensor()};
}

}  // namespace minifloat::torch_ops
