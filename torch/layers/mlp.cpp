// The layers of a transformer's MLP under one recipe, differentiable as a whole:
//
//     forward    gate = x · Wgᵀ,  up = x · Wuᵀ     h = act(gate) · up,  or act(gate) without up
//                y = h · Wdᵀ                       h is cast rowwise as it is computed
//     saved      x columnwise, gate, up, and the weights columnwise, or the weights themselves
//                where backward casts them again; h only where its history will have moved on
//     backward   dh = dy · Wd
//                from dh, gate and up: both directions of d_gate and d_up, and h columnwise
//                dWd = dyᵀ · h,  dWg = d_gateᵀ · x,  dWu = d_upᵀ · x
//                dx = d_gate · Wg + d_up · Wu
//
// h, d_gate and d_up are written as codes alone, except where an operand is bf16, a bias needs its
// gradient, or a scale is that of a whole tensor: then one pass writes the values and finds their
// amaxes, and the casts read them. Every byte equals that of `linear`, `activation` and `linear`.
// torch.compile records the cast of x and an op each way (mlp_ops.h).
#include <ATen/ATen.h>
#include <torch/library.h>

#include "layers/layer_call.h"
#include "layers/mlp.h"
#include "layers/mlp_ops.h"
#include "ops/bridge.h"
#include "ops/op.h"

namespace minifloat {
namespace {

using namespace torch_ops;
using variable_list = std::vector<Tensor>;

// Runs the forward pass.
Tensor forward_pass(const Tensor& x, const MlpForward& pass) {
  const ForwardPass inputs = pass.inputs();
  if (records_mlp(pass, x)) {
    const QuantizedOperand rowwise = cast_input(inputs, kMlp, x).first;
    return as_output(record_mlp(pass, rowwise), x, nullptr);
  }
  return as_output(multiply_hidden(pass, multiply_by_weights(inputs, kMlp, x)), x, nullptr);
}

Tensor mlp_kernel(const LayerCall& call) {
  const Tensor& x = call.x;
  const std::size_t n = call.weights.size(), inputs = n - 1;
  check_counts(kMlp, n,
               {{"rng", call.rng.size()},
                {"amax_history", call.histories.size()},
                {"streams", call.streams.size()},
                {"main_grads", call.main_grads.size()}});
  TORCH_CHECK_VALUE(call.bias_index.size() == n, kMlp, ": expected ", n, " biases, got ",
                    call.bias_index.size());
  TORCH_CHECK_VALUE(call.weight_operands.empty() || call.weight_operands.size() == 8 * n, kMlp,
                    ": expected ", 8 * n, " tensors of weight_operands for ", n, " weights, got ",
                    call.weight_operands.size());
  const Mlp mlp = {layers_of(kMlp, call, 0, inputs), layers_of(kMlp, call, inputs, 1),
                   call.activation};
  const PreparedRecipe& prepared = prepare(call.recipe);
  check_mlp(x, mlp, prepared);
  check_no_tangent(kMlp, "x", x);
  for (const Tensor& w : call.weights) check_no_tangent(kMlp, "weight", w);
  for (const Tensor& b : call.biases) check_no_tangent(kMlp, "bias", b);
  const NeededGradients of_inputs(x, mlp.inputs);
  const MlpNeeds needs = {of_inputs, NeededGradients(of_inputs.any(), mlp.output)};
  if (!of_inputs.any() && !needs.output.any())
    return forward_pass(x, {mlp, prepared, needs, x.scalar_type(), nullptr});
  const auto forward = [&]() -> ForwardResult {
    variable_list saved;
    Tensor y = forward_pass(x, {mlp, prepared, needs, x.scalar_type(), &saved});
    return {
        {std::move(y)}, std::move(saved), c10::make_intrusive<MlpState>(x, mlp, prepared, needs)};
  };
  return differentiate(joined({x, call.weights, call.biases}), forward).front();
}

}  // namespace

namespace torch_ops {

void check_counts(const char* op, std::size_t n,
                  std::initializer_list<std::pair<const char*, std::size_t>> lists) {
  TORCH_CHECK_VALUE(n == 2 || n == 3, op,
                    ": expected 2 weights (up, down) or 3 (gate, up, down), got ", n);
  for (const auto& [name, count] : lists)
    TORCH_CHECK_VALUE(count == 0 || count == n, op, ": expected ", n, " ", name, " for ", n,
                      " weights, got ", count);
}

void check_mlp(const Tensor& x, const Mlp& mlp, const PreparedRecipe& prepared) {
  TORCH_CHECK_VALUE(
      mlp.activation == "silu" || mlp.activation == "gelu" || mlp.activation == "gelu_tanh", kMlp,
      ": expected activation 'silu', 'gelu' or 'gelu_tanh', got '", printable(mlp.activation), "'");
  check_layers(x, mlp.inputs, prepared);
  const Tensor& first = mlp.inputs.weights[0];
  TORCH_CHECK_VALUE(!mlp.is_gated() || mlp.inputs.weights[1].sym_sizes().equals(first.sym_sizes()),
                    kMlp, ": expected gate's and up's weights of one shape, got ",
                    first.sym_sizes(), " and ", mlp.inputs.weights.back().sym_sizes());
  // h has the shape of x with I columns; its dtype and device are x's.
  c10::SymDimVector shape(x.sym_sizes().begin(), x.sym_sizes().end());
  shape.back() = first.sym_size(0);
  check_layers(x.new_empty({1}).expand_symint(shape), mlp.output, prepared);
}

ForwardPass MlpForward::pass_of(const Layers& layers, const NeededGradients& needed,
                                std::size_t i) const {
  return {.prepared = prepared,
          .layers = layers,
          .needs = needed,
          .dtype = dtype,
          .out_dtype = dtype,
          .k = layers.features_of(0)[1],
          .saved = saved,
          .returns_saved = returns_saved,
          .returns_swizzled = returns_swizzled[i]};
}

Tensor multiply_hidden(const MlpForward& pass, const std::vector<Tensor>& products) {
  const PreparedRecipe& prepared = pass.prepared;
  const Gates gates = {products[0],
                       pass.mlp.is_gated() ? std::optional(products[1]) : std::nullopt};
  const ForwardPass output = pass.output();
  const bool needs_h = output.needs.any_dw;
  const OperandUse row{kFpropX, true,
                       output.fprop().reads_values() && !prepared.keeps_codes(kFpropX)},
      col{kWgradX, needs_h && saves_h(prepared)};
  CastContext state = output.state_of_rows(0);
  state.returns_amaxes = true;
  state.swizzled_apart = false;  // of h, unlike the weight
  state.casts_other_later = needs_h && !col.is_needed;
  const Directions h = quantize_h(prepared, gates, pass.mlp.activation, row, col, state);
  output.save(h.second, kWgradX);
  Tensor y = multiply_operand(output, h.first, row).front();
  if (pass.saved) pass.saved->insert(pass.saved->end(), {gates.gate, gates.up.value_or(Tensor())});
  return y;
}

}  // namespace torch_ops

TORCH_LIBRARY_IMPL(minifloat, CompositeImplicitAutograd, m) {
  m.impl("mlp", torch::CppFunction::makeFromBoxedFunction<&run_layer<mlp_kernel>>());
}

}  // namespace minifloat
