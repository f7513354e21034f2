#include "layers/mlp_ops.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <functional>
#include <tuple>
#include <utility>

#include "layers/layer_call.h"
#include "layers/recorded_args.h"
#include "ops/activation_inputs.h"
#include "ops/bridge.h"
#include "ops/op.h"
#include "ops/outputs.h"

namespace minifloat::torch_ops {
namespace {

constexpr const char* kForward = "mlp_forward";
constexpr const char* kBackward = "mlp_backward";

using MaybeTensors = c10::List<std::optional<Tensor>>;
using Flags = std::array<bool, 3>;  // of the weights: of gate, up and down, or of up and down

// The results of an op that writes may not be a list: torch cannot trace it.
template <std::size_t... kIs>
auto tuple_of(const std::vector<Tensor>& list, const Tensor& like, std::index_sequence<kIs...>) {
  return std::make_tuple(or_empty(kIs < list.size() ? &list[kIs] : nullptr, like)...);
}
template <class Tuple>
Tuple as_results(const std::vector<Tensor>& list, const Tensor& like) {
  return tuple_of(list, like, std::make_index_sequence<std::tuple_size_v<Tuple>>());
}
std::vector<Tensor> as_list(const auto& results) {
  return std::apply([](const auto&... t) { return std::vector<Tensor>{t...}; }, results);
}

// ---- forward ------------------------------------------------------------------------------------

// y, then what mlp_gradients reads in its order, without x: 14 tensors, or 11 of 2 weights.
using ForwardResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                                  Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// needed: dx, dh and the gradient of the last weight
ForwardResults mlp_forward(const Tensor& x_codes, const Tensor& x_scale, const Tensor& x_amax,
                           const Tensor& x_decoded, at::TensorList weights,
                           const MaybeTensors& biases, const std::string& recipe,
                           const std::string& activation, at::ScalarType dtype, Flags needed,
                           const std::string& recompute, at::TensorList rng,
                           at::TensorList histories, at::IntArrayRef streams,
                           std::array<bool, 2> swizzled) {
  const PreparedRecipe& prepared = prepare(recipe);
  check_recipe(kForward, prepared);
  check_dtype(kForward, "dtype", dtype);
  const std::size_t n = weights.size();
  check_counts(kForward, n,
               {{"biases", biases.size()},
                {"rng", rng.size()},
                {"amax_history", histories.size()},
                {"streams", streams.size()}});
  for (const Tensor& w : weights) {
    TORCH_CHECK_VALUE(w.dim() == 2 && (w.sym_stride(1) == 1 || w.sym_size(1) == 1), kForward,
                      ": expected weights (N, K) with adjacent columns, got ", w.sym_sizes(),
                      ", strides ", w.sym_strides());
    bridge::check_memory_if_real(kForward, "weight", w);
  }
  const Spec& of_w = prepared.specs[kDgradW];
  TORCH_CHECK_VALUE(!(swizzled[0] || swizzled[1]) || (of_w.has_blocks() && of_w.scale_bytes() == 1),
                    kForward, ": expected swizzled scales of MX or NVFP4, got those of ",
                    of_w.str());
  const SymInt& k = weights[0].sym_size(1);
  const QuantizedOperand x =
      checked_x(kForward, prepared, {x_codes, x_scale, x_amax, x_decoded}, weights[0], k);
  LayerCall call;
  call.weights = weights.vec();
  call.rng = rng.vec(), call.histories = histories.vec(), call.streams = streams.vec();
  call.recompute = recompute;
  for (std::size_t i = 0; i < n; ++i) {
    const std::optional<Tensor> bias = biases.empty() ? std::nullopt : biases.get(i);
    call.bias_index.push_back(bias ? static_cast<int>(call.biases.size()) : -1);
    if (bias) call.biases.push_back(*bias);
  }
  const Mlp mlp = {layers_of(kForward, call, 0, n - 1), layers_of(kForward, call, n - 1, 1),
                   activation};
  // Of x only its shape is known. Checks the states too.
  check_mlp(empty_result(weights[0], {0, k}, dtype), mlp, prepared);
  MlpNeeds needs = {NeededGradients(needed[0]), NeededGradients(needed[1])};
  needs.output.any_dw = needed[2];
  std::vector<Tensor> saved;
  const MlpForward pass = {mlp, prepared, needs, dtype, &saved, /*returns_saved=*/true, swizzled};
  const OperandUse row{.place = kFpropX, .decoded = is_decoded(x.decoded)};
  const std::vector<Tensor> products = multiply_operand(pass.inputs(), x, row);
  std::vector<Tensor> out = {multiply_hidden(pass, products)};
  for (std::size_t i = 0; i < n; ++i) {  // the caller has weights themselves
    const std::size_t first = 3 * (i + 1 < n ? i : n);
    if (saves_weight_itself(i + 1 < n ? pass.inputs() : pass.output()))
      saved[first] = saved[first + 1] = Tensor();
  }
  out.insert(out.end(), saved.begin(), saved.end());
  return as_results<ForwardResults>(out, weights[0]);
}

// Under delayed scaling the ops write to histories; see layer_ops.cpp.
const Op mlp_forward_op(kForward, mlp_forward, without_derivative()),
    mlp_forward_delayed_op("mlp_forward_delayed", mlp_forward, without_derivative());

// ---- backward -----------------------------------------------------------------------------------

// dx, then dW of each weight, then db of each.
using BackwardResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Requires gate and up (M, I), and what forward saved of each weight, of x and of h.
void check_saved(const MlpLayers& layers, at::TensorList saved, const SymInt& m) {
  const PreparedRecipe& recipe = layers.inputs.recipe;
  const MlpNeeds& needs = layers.needs;
  const std::size_t n = layers.count();
  const auto& [i, k] = layers.inputs.features[0];
  const Tensor& gate = saved[saved.size() - 2];
  const std::optional<Tensor> up = n == 2 ? std::optional(saved.back()) : std::nullopt;
  check_activation({.op = kBackward, .gate = gate, .up = up, .activation = layers.activation},
                   nullptr, /*is_matrix=*/true);
  TORCH_CHECK_VALUE(gate.scalar_type() == layers.inputs.x_dtype && gate.sym_size(0) == m, kBackward,
                    ": expected gate as ", layers.inputs.x_dtype, " (", m, ", I), got ",
                    gate.scalar_type(), " ", gate.sym_sizes());
  if (needs.inputs.any_dw) check_saved_x(kBackward, "the saved x", recipe, saved, m, k);
  for (std::size_t w = 0; w < n && needs.inputs.dx; ++w)
    check_saved_weight(kBackward, recipe, saved.slice(3 * (w + 1)), i, k);
  const at::TensorList output = saved.slice(3 * (n + 1));
  if (needs.output.dx)
    check_saved_weight(kBackward, recipe, output.slice(3), layers.output.features[0][0], i);
  if (!needs.output.any_dw) return;
  if (saves_h(recipe)) return check_saved_x(kBackward, "the saved h", recipe, output, m, i);
  TORCH_CHECK_VALUE(output[2].scalar_type() == at::kFloat && output[2].sym_numel() <= 1, kBackward,
                    ": expected the amax of h as one float32 or none, got ",
                    output[2].scalar_type(), " ", output[2].sym_sizes());
}

// Returns the gradients of x, of each weight and of each bias; undefined where one is not needed.
std::vector<Tensor> shapes_of_gradients(const MlpLayers& layers, const Tensor& g) {
  std::vector<Tensor> out, biases;
  const auto add = [&](bool is_needed, c10::SymIntArrayRef shape, at::ScalarType dtype) {
    out.push_back(is_needed ? empty_result(g, shape, dtype) : Tensor());
  };
  const SymInt x_shape[] = {g.sym_size(0), layers.inputs.features[0][1]};
  add(layers.needs.inputs.dx, x_shape, layers.inputs.x_dtype);
  for (const bool of_biases : {false, true})
    for (const auto& [saved, needs] : {std::pair{&layers.inputs, &layers.needs.inputs},
                                       std::pair{&layers.output, &layers.needs.output}})
      for (std::size_t i = 0; i < saved->features.size(); ++i) {
        if (!of_biases)
          add(needs->dw[i], saved->features[i], saved->weight_dtypes[i]);
        else
          add(needs->db[i], saved->features[i][0], saved->bias_dtypes[i]);
      }
  return out;
}

BackwardResults mlp_backward(const Tensor& grad, at::TensorList saved, const std::string& recipe,
                             const std::string& activation, bool needs_dx, Flags needs_dw,
                             Flags needs_db, c10::SymInt k, at::ScalarType x_dtype,
                             at::ScalarType product_dtype, at::ScalarType weight_dtype,
                             at::ScalarType bias_dtype, at::TensorList rng,
                             at::TensorList histories, at::IntArrayRef streams) {
  const PreparedRecipe& prepared = prepare(recipe);
  bridge::check_value_dtype(kBackward, "grad", grad);
  TORCH_CHECK_VALUE(grad.dim() >= 1 && k >= 0, kBackward, ": expected grad (…, N) and K, got ",
                    grad.sym_sizes(), " and ", k);
  TORCH_CHECK_VALUE(saved.size() == 14 || saved.size() == 17, kBackward,
                    ": expected 14 saved tensors, or 17 of a gated one, got ", saved.size());
  const std::size_t n = saved.size() == 14 ? 2 : 3;
  check_counts(
      kBackward, n,
      {{"rng", rng.size()}, {"amax_history", histories.size()}, {"streams", streams.size()}});
  for (const at::ScalarType dtype : {x_dtype, product_dtype, weight_dtype, bias_dtype})
    check_dtype(kBackward, "dtypes", dtype);
  for (std::size_t i = 0; i < n; ++i)
    check_state(kBackward, prepared, rng.empty() ? std::nullopt : std::optional(rng[i]),
                histories.empty() ? std::nullopt : std::optional(histories[i]), grad);
  bridge::check_same_device(kBackward, "saved", saved, grad);
  bridge::check_memory_if_real(kBackward, "grad", grad);
  for (const Tensor& t : saved) bridge::check_memory_if_real(kBackward, "saved", t);
  const Tensor g = as_matrix(kMlp, "gradient", grad);
  const Tensor& gate = saved[saved.size() - 2];
  TORCH_CHECK_VALUE(gate.dim() == 2, kBackward, ": expected gate (M, I), got ", gate.sym_sizes());

  MlpLayers layers = {{prepared, x_dtype}, {prepared, x_dtype}, activation, {}};
  for (std::size_t i = 0; i < n; ++i) {
    const bool is_output = i + 1 == n;
    SavedLayers& of = is_output ? layers.output : layers.inputs;
    NeededGradients& needs = is_output ? layers.needs.output : layers.needs.inputs;
    of.streams.push_back(streams.empty() ? 0 : streams[i]);
    of.product_dtypes.push_back(product_dtype);
    of.weight_dtypes.push_back(weight_dtype);
    of.bias_index.push_back(static_cast<int>(of.bias_dtypes.size()));
    of.bias_dtypes.push_back(bias_dtype);
    if (is_output)
      of.features.push_back({g.sym_size(1), gate.sym_size(1)});
    else
      of.features.push_back({gate.sym_size(1), k});
    if (!rng.empty()) of.rng.push_back(rng[i]);
    if (!histories.empty()) of.histories.push_back(histories[i]);
    needs.dw.push_back(needs_dw[i]);
    needs.db.push_back(needs_db[i]);
    needs.any_dw |= needs_dw[i];
  }
  layers.needs.inputs.dx = needs_dx;
  layers.needs.output.dx = layers.needs.inputs.any();
  check_saved(layers, saved, g.sym_size(0));
  if (grad.is_meta()) return as_results<BackwardResults>(shapes_of_gradients(layers, g), grad);
  std::vector<Tensor> tensors;
  for (const Tensor& t : saved) tensors.push_back(or_undefined(t));
  return as_results<BackwardResults>(mlp_gradients(layers, tensors, g), grad);
}

const Op mlp_backward_op(kBackward, mlp_backward, without_derivative()),
    mlp_backward_delayed_op("mlp_backward_delayed", mlp_backward, without_derivative());

// Returns a list of both layers' elements.
template <class List>
std::vector<typename List::value_type> both(const List& inputs, const List& output) {
  std::vector<typename List::value_type> list(inputs.begin(), inputs.end());
  list.insert(list.end(), output.begin(), output.end());
  return list;
}

// Returns whether all dtypes are equal.
bool is_one(const std::vector<at::ScalarType>& dtypes) {
  return std::adjacent_find(dtypes.begin(), dtypes.end(), std::not_equal_to<>()) == dtypes.end();
}

}  // namespace

bool records_mlp(const MlpForward& pass, const Tensor& x) {
  // Else h, which forward saves, has the codes that forward reads.
  return records_forward(pass.prepared, pass.mlp.inputs, x) && !pass.prepared.keeps_codes(kFpropX);
}

Tensor record_mlp(const MlpForward& pass, const QuantizedOperand& x) {
  const ForwardPass inputs = pass.inputs(), output = pass.output();
  const Layers &first = inputs.layers, &last = output.layers;
  MaybeTensors biases;
  for (std::size_t i = 0; i < first.weights.size(); ++i) biases.push_back(first.bias_of(i));
  biases.push_back(last.bias_of(0));
  const bool is_saved = pass.saved != nullptr;
  const std::vector<Tensor> weights = both(first.weights, last.weights);
  const auto& op = first.histories.empty() ? mlp_forward_op : mlp_forward_delayed_op;
  const std::vector<Tensor> out = as_list(op(
      x.codes, x.scale, or_empty(&x.amax, x.codes), x.decoded, weights, biases, pass.prepared.text,
      pass.mlp.activation, pass.dtype,
      {is_saved && inputs.needs.dx, is_saved && output.needs.dx, is_saved && output.needs.any_dw},
      first.recomputes_weights ? "weight" : "", both(first.rng, last.rng),
      both(first.histories, last.histories), both(first.streams, last.streams),
      {returns_swizzled(inputs, 0), returns_swizzled(output, 0)}));
  if (!is_saved) return out[0];
  const std::size_t begin = pass.saved->size(), count = 3 * (weights.size() + 1) + 2;
  for (std::size_t i = 1; i <= count; ++i) pass.saved->push_back(or_undefined(out[i]));
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const bool is_input = i < first.weights.size();
    if (saves_weight_itself(is_input ? inputs : output))
      (*pass.saved)[begin + 3 * (is_input ? i : i + 1)] = weights[i];
  }
  return out[0];
}

bool records_mlp_gradients(const MlpLayers& layers, const std::vector<Tensor>& grads) {
  const SavedLayers &inputs = layers.inputs, &output = layers.output;
  return records_backward(inputs, grads) && records_backward(output, grads) &&
         is_one(both(inputs.product_dtypes, output.product_dtypes)) &&
         is_one(both(inputs.weight_dtypes, output.weight_dtypes)) &&
         is_one(both(inputs.bias_dtypes, output.bias_dtypes));
}

std::vector<Tensor> record_mlp_gradients(const MlpLayers& layers, const std::vector<Tensor>& saved,
                                         const Tensor& dy) {
  const SavedLayers &inputs = layers.inputs, &output = layers.output;
  const std::size_t n = layers.count() + 1;
  std::vector<Tensor> tensors;
  for (const Tensor& t : saved) tensors.push_back(or_empty(&t, dy));
  const std::vector<at::ScalarType> bias_dtypes = both(inputs.bias_dtypes, output.bias_dtypes);
  Flags needs_dw = {}, needs_db = {};
  std::vector<int> biases;  // of each weight, among those of the call; -1: none
  for (std::size_t i = 0; i < n; ++i) {
    const bool is_input = i + 1 < n;
    const NeededGradients& needs = is_input ? layers.needs.inputs : layers.needs.output;
    const std::size_t at = is_input ? i : 0;
    const int bias = (is_input ? inputs : output).bias_index[at];
    needs_dw[i] = needs.dw[at];
    needs_db[i] = bias >= 0 && needs.db[static_cast<std::size_t>(bias)];
    biases.push_back(bias < 0 || is_input ? bias
                                          : static_cast<int>(inputs.bias_dtypes.size()) + bias);
  }
  const auto& op = inputs.histories.empty() ? mlp_backward_op : mlp_backward_delayed_op;
  const std::vector<Tensor> found = as_list(
      op(dy, tensors, inputs.recipe.text, layers.activation, layers.needs.inputs.dx, needs_dw,
         needs_db, inputs.features[0][1], inputs.x_dtype, inputs.product_dtypes[0],
         inputs.weight_dtypes[0], bias_dtypes.empty() ? inputs.x_dtype : bias_dtypes[0],
         both(inputs.rng, output.rng), both(inputs.histories, output.histories),
         both(inputs.streams, output.streams)));
  std::vector<Tensor> out(1 + n + bias_dtypes.size());
  if (layers.needs.inputs.dx) out[0] = found[0];
  for (std::size_t i = 0; i < n; ++i) {
    if (needs_dw[i]) out[1 + i] = found[1 + i];
    if (needs_db[i]) out[1 + n + static_cast<std::size_t>(biases[i])] = found[1 + n + i];
  }
  return out;
}

}  // namespace minifloat::torch_ops
