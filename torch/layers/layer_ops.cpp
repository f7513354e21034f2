#include "layers/layer_ops.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <tuple>

#include "ops/bridge.h"
#include "ops/op.h"
#include "ops/outputs.h"
#include "ops/tracing.h"

namespace minifloat::torch_ops {
namespace {

using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

// Returns what an op returned, or undefined where it is empty: what the op did not compute.
Tensor or_undefined(const Tensor& t) { return t.sym_numel() == 0 ? Tensor() : t; }

Tensor empty_result(const Tensor& like, c10::SymIntArrayRef shape, at::ScalarType dtype) {
  return at::empty_symint(shape, like.options().dtype(dtype));
}

std::optional<Tensor> or_none(const Tensor& t) {
  return t.defined() ? std::optional(t) : std::nullopt;
}

// Requires what a trace passes: a recipe, and the state that it needs. like: on the layer's device
void check_state(const char* op, const PreparedRecipe& recipe, const std::optional<Tensor>& rng,
                 const std::optional<Tensor>& history, const Tensor& like) {
  TORCH_CHECK_VALUE(!recipe.is_stochastic || rng, op, ": recipe ", recipe.text,
                    " rounds stochastically and needs rng");
  TORCH_CHECK_VALUE(!recipe.is_delayed || history, op, ": recipe ", recipe.text,
                    " scales by history and needs amax_history");
  if (rng) {
    bridge::check_rng(op, *rng, like);
    bridge::check_memory_if_real(op, "rng", *rng);
  }
  if (history) check_history(op, *history, like);
}

void check_dtype(const char* op, const char* name, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16, op, ": expected ", name,
                    " float32 or bfloat16, got ", dtype);
}

// Requires an operand (rows, cols) as a product reads it, of which a cast may write to a history
// before the product checks it.   rows: none: any
void check_operand(const char* op, const char* name, const Spec& spec, const Tensor& elements,
                   const Tensor& scale, const Tensor& amax, const std::optional<SymInt>& rows,
                   const SymInt& cols, bool is_decoded = false) {
  TORCH_CHECK_VALUE(elements.defined() && scale.defined() && amax.defined(), op, ": expected ",
                    name, " as three tensors, got none");
  check_input(name, spec, input_of(spec, elements, scale, amax),
              {.k = cols, .values_k = cols, .matrices = {}, .groups = {}});
  const at::ScalarType dtype = elements.scalar_type();
  TORCH_CHECK_VALUE(
      spec.is_bf16() || (elements.is_contiguous() &&
                         (dtype == at::kByte || is_decoded || dtype == at::kFloat8_e4m3fn)),
      op, ": expected contiguous ", name, " as codes or values are, got ", dtype, ", strides ",
      elements.sym_strides());
  TORCH_CHECK_VALUE(!rows || elements.sym_size(0) == *rows, op, ": expected ", name, " of ",
                    rows.value_or(0), " rows, got ", elements.sym_size(0));
}

// Requires W (n, k) itself with the amax of its columnwise cast, or as codes.   w: three tensors
void check_saved_weight(const char* op, const PreparedRecipe& recipe, at::TensorList w,
                        const SymInt& n, const SymInt& k) {
  const Spec& spec = recipe.spec_of_codes(kDgradW);
  const bool is_rowwise = recipe.specs[kDgradW].is_of_forward();
  if (!w[0].defined() || !w[0].is_floating_point() || spec.is_bf16())
    return check_operand(op, "the saved weight", spec, w[0], w[1], w[2], is_rowwise ? n : k,
                         is_rowwise ? k : n);
  bridge::check_value_dtype(op, "the saved weight", w[0]);
  const c10::SymDimVector shape = {n, k}, of_amax(spec.has_row_amax() ? 1 : 0, k);
  TORCH_CHECK_VALUE(w[0].sym_sizes().equals(shape) && w[0].sym_stride(1) == 1, op,
                    ": expected the saved weight (", n, ", ", k, ") with adjacent columns, got ",
                    w[0].sym_sizes(), ", strides ", w[0].sym_strides());
  TORCH_CHECK_VALUE(w[2].defined() && w[2].scalar_type() == at::kFloat &&
                        (w[2].sym_numel() == 0 || w[2].sym_sizes().equals(of_amax)),
                    op, ": expected the saved weight's amax as float32 ", of_amax, " or none");
}

bool records_recipe(const PreparedRecipe& recipe) {
  // Else what backward reads of W is W itself, or what forward reads.
  return !recipe.reads_values(kFpropX) && !recipe.reads_values(kFpropW) &&
         !recipe.reads_values(kDgradW) && !recipe.keeps_codes(kFpropW);
}

// ---- forward ------------------------------------------------------------------------------------

FourTensors linear_forward(const Tensor& x_codes, const Tensor& x_scale, const Tensor& x_amax,
                           const Tensor& x_decoded, const Tensor& weight,
                           const std::optional<Tensor>& bias, const std::string& recipe,
                           at::ScalarType dtype, bool needs_dx, const std::string& recompute,
                           const std::optional<Tensor>& rng, const std::optional<Tensor>& history,
                           std::int64_t stream, bool swizzled) {
  constexpr const char* kOp = "linear_forward";
  const PreparedRecipe& prepared = prepare(recipe);
  TORCH_CHECK_VALUE(records_recipe(prepared), kOp,
                    ": expected a recipe whose forward reads codes, ",
                    "and dgrad codes of its own, got ", recipe);
  TORCH_CHECK_VALUE(weight.dim() == 2, kOp, ": expected weight (N, K), got ", weight.sym_sizes());
  check_dtype(kOp, "dtype", dtype);
  const Tensor x_tensors[] = {x_codes, x_scale, x_amax, x_decoded};
  bridge::check_same_device(kOp, "x", x_tensors, weight);
  for (const Tensor& t : x_tensors) bridge::check_memory_if_real(kOp, "x", t);
  const bool decoded = x_decoded.defined() && x_decoded.dim() == 2;
  check_operand(kOp, "x", prepared.specs[kFpropX], decoded ? x_decoded : x_codes, x_scale, x_amax,
                std::nullopt, weight.sym_size(1), decoded);
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
  const bool casts_later = needs_dx && layers.recomputes_weights;
  Tensor y;
  if (weight.is_meta()) {  // whose engines another device may not have
    pass.save(weight_operands(pass, 0, {kFpropW}, {kDgradW, needs_dx}, casts_later).second,
              kDgradW);
    y = empty_result(x_codes, {x_codes.sym_size(0), weight.sym_size(0)}, dtype);
  } else {
    y = multiply_operand(pass, {x_codes, x_scale, or_undefined(x_amax), x_decoded},
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
  const bool is_rowwise = prepared.specs[kWgradX].is_of_forward();
  if (needs_dw)
    check_operand(kOp, "the saved x", prepared.spec_of_codes(kWgradX), saved[0], saved[1], saved[2],
                  is_rowwise ? m : k, is_rowwise ? k : m);
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

bool records_forward(const PreparedRecipe& recipe, const Layers& layers, const Tensor& t) {
  if (!is_compiled(t) || layers.shards.sharding || layers.groups ||
      !layers.prequantized.weight.empty())
    return false;
  return records_recipe(recipe);
}

std::vector<Tensor> record_forward(const ForwardPass& pass, const QuantizedOperand& x) {
  const Layers& layers = pass.layers;
  const bool saves_itself = layers.recomputes_weights && pass.saved && pass.needs.dx;
  std::vector<Tensor> outputs;
  for (std::size_t i = 0; i < layers.weights.size(); ++i) {
    const Tensor& weight = layers.weights[i];
    const CastContext state = pass.state_of(i);
    const auto& op = layers.histories.empty() ? linear_forward_op : linear_forward_delayed_op;
    // Planned here: the op's meta kernel knows no device, and so no engine.
    const bool swizzled = plan_cast(pass.prepared, weight, {kFpropW, false},
                                    {kDgradW, pass.saved && pass.needs.dx && !saves_itself}, state)
                              .options.swizzled_col;
    auto [y, codes, scale, amax] = op(
        x.codes, x.scale, or_empty(&x.amax, x.codes), x.decoded, weight, layers.bias_of(i),
        pass.prepared.text, pass.dtype, pass.saved && pass.needs.dx, saves_itself ? "weight" : "",
        or_none(state.rng), or_none(state.history), state.stream, swizzled);
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
  const auto is_recorded = [](const Tensor& g) { return !g.defined() || is_compiled(g); };
  return std::all_of(grads.begin(), grads.end(), is_recorded) && !layers.sharding &&
         !layers.groups && !layers.accumulation.is_on();
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
