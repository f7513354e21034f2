// Linear layers under a recipe, differentiable. One function serves a layer and a group of layers
// that share their input:
//
//     forward    x  -> rowwise for fprop, columnwise for wgrad        one cast
//                W  -> rowwise for fprop, columnwise for dgrad        one cast
//                y  = x · Wᵀ                                          for each W
//     saved      x columnwise and W columnwise, in their specs: high precision where a spec is
//                bf16; under recompute W itself instead, which backward quantizes
//     backward   g  -> rowwise for dgrad, columnwise for wgrad        one cast
//                dx = g · W     (the sum over the group's layers),     dW = gᵀ · x
//
// A cast reads the matrix for both directions at once, after a read for an amax where a rule has
// one of the tensor. Operands that no gradient needs are neither computed nor saved. The op is
// composite: below it the dispatcher sees quantize and scaled_mm, where it cannot be skipped
// (ops/direct.h), and torch.compile sees fewer and larger ops (layer_ops.h).
#include <ATen/ATen.h>
#include <torch/library.h>

#include "layers/arguments.h"
#include "layers/layer_call.h"
#include "layers/layer_ops.h"
#include "layers/layer_state.h"
#include "layers/linear_gradients.h"
#include "layers/passes.h"
#include "layers/recorded_args.h"
#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/op.h"

namespace minifloat {
namespace {

using namespace torch_ops;
using variable_list = std::vector<Tensor>;

// Runs the forward pass.
//   saved: what LinearState::gradients reads; null where no gradient is needed
//   deferred_amaxes: takes current amaxes instead of the histories, or null
std::vector<Tensor> forward_pass(const Tensor& x, const Layers& layers,
                                 const PreparedRecipe& prepared, const NeededGradients& needs,
                                 variable_list* saved, CurrentAmaxes* deferred_amaxes) {
  const ForwardPass pass = {.prepared = prepared,
                            .layers = layers,
                            .needs = needs,
                            .dtype = x.scalar_type(),
                            .out_dtype = x.scalar_type(),
                            .k = x.sym_size(-1),
                            .saved = saved,
                            .deferred_amaxes = deferred_amaxes};
  std::vector<Tensor> outputs = multiply_by_weights(pass, "linear", x);
  for (Tensor& y : outputs) y = as_output(std::move(y), x, layers.shards.sharding);
  return outputs;
}

// Values that backward reads besides the saved tensors, and the backward pass.
class LinearState : public LayerState {
 public:
  LinearState(const Tensor& x, const Layers& layers, const PreparedRecipe& recipe,
              const NeededGradients& needs, CurrentAmaxes deferred_amaxes)
      : LayerState("linear", recipe),
        layers_(layers, recipe, x.scalar_type()),
        x_{x.sym_sizes().vec(), layers.shards.gathered},
        needs_(needs),
        deferred_amaxes_(std::move(deferred_amaxes)) {
    add_rng(layers.rng);
    add_histories(layers.histories);
  }

  // Returns the gradients of x, weights and biases.
  variable_list gradients(const variable_list& saved, const variable_list& grads) const override {
    const std::size_t n = grads.size();
    raise(deferred_amaxes_);
    variable_list out(1 + n + layers_.bias_dtypes.size());
    const bool is_cut = layers_.sharding && layers_.sharding->token_dim;
    const bool is_recorded = records_backward(layers_, grads);
    ProductInput x;
    if (!is_cut && !is_recorded) x = saved_input(layers_, saved, 0, kWgradX);
    for (std::size_t i = 0; i < n; ++i) {
      if (!grads[i].defined()) continue;
      const LayerGradients d = is_recorded
                                   ? record_backward(layers_, needs_, i, grads[i], saved)
                                   : linear_gradients(layers_, needs_, i, grads[i], x, saved, x_);
      if (d.x.defined()) out[0] = out[0].defined() ? out[0] + d.x : d.x;
      out[1 + i] = d.weight;
      if (d.bias.defined()) out[1 + n + static_cast<std::size_t>(layers_.bias_index[i])] = d.bias;
    }
    if (out[0].defined() && x_.shape.size() != 2) out[0] = out[0].view_symint(x_.shape);
    return out;
  }

 private:
  SavedLayers layers_;
  CutInput x_;
  NeededGradients needs_;
  CurrentAmaxes deferred_amaxes_;  // of the forward pass
};

std::vector<Tensor> linear_group_kernel(const LayerCall& call) {
  const Tensor& x = call.x;
  Layers layers = layers_of("linear", call, 0, call.weights.size());
  const PreparedRecipe& prepared = prepare(call.recipe);
  check_layers(x, layers, prepared);
  check_no_tangent("linear", "x", x);
  for (const Tensor& w : layers.weights) check_no_tangent("linear", "weight", w);
  for (const Tensor& b : layers.biases) check_no_tangent("linear", "bias", b);
  const std::vector<Tensor> codes = cached_codes(call);
  if (!codes.empty()) layers.prequantized.weight = codes;
  const NeededGradients needs(x, layers);
  if (!needs.any()) return forward_pass(x, layers, prepared, needs, nullptr, nullptr);
  const auto forward = [&]() -> ForwardResult {
    // A trace with DTensor inputs accepts writes to a tensor from one pass alone (torch 2.11), so
    // backward raises the histories to the amaxes that forward finds.
    const bool is_traced = layers.shards.sharding && !layers.histories.empty() &&
                           !can_skip_dispatcher({&layers.histories[0]});
    variable_list saved;
    CurrentAmaxes deferred_amaxes;
    variable_list outputs =
        forward_pass(x, layers, prepared, needs, &saved, is_traced ? &deferred_amaxes : nullptr);
    return {
        std::move(outputs), std::move(saved),
        c10::make_intrusive<LinearState>(x, layers, prepared, needs, std::move(deferred_amaxes))};
  };
  return differentiate(joined({x, layers.weights, layers.biases}), forward);
}

Tensor linear_kernel(const LayerCall& call) { return linear_group_kernel(call).front(); }

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, CompositeImplicitAutograd, m) {
  register_gathered_input();
  for (const char* op : {"linear", "linear_sharded"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&run_layer<linear_kernel>>());
  m.impl("linear_group",
         torch::CppFunction::makeFromBoxedFunction<&run_layer<linear_group_kernel>>());
}

}  // namespace minifloat
