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
// (ops/direct.h).
#include <ATen/ATen.h>
#include <torch/library.h>

#include "layers/arguments.h"
#include "layers/layer_call.h"
#include "layers/layer_state.h"
#include "layers/operands.h"
#include "layers/passes.h"
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
        x_shape_(x.sym_sizes().vec()),
        needs_(needs),
        gathered_(layers.shards.gathered),
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
    ProductInput x = is_cut ? ProductInput() : saved_input(layers_, saved, 0, kWgradX);
    for (std::size_t i = 0; i < n; ++i) {
      if (!grads[i].defined()) continue;
      const LayerGradients d = layer_backward(i, grads[i], x, saved);
      if (d.x.defined()) out[0] = out[0].defined() ? out[0] + d.x : d.x;
      out[1 + i] = d.weight;
      if (d.bias.defined()) out[1 + n + static_cast<std::size_t>(layers_.bias_index[i])] = d.bias;
    }
    if (out[0].defined() && x_shape_.size() != 2) out[0] = out[0].view_symint(x_shape_);
    return out;
  }

 private:
  // Begins to gather x as wgrad reads x, with the tokens of all ranks.
  //   returns the gather; none: that of the layers that share x has begun
  std::optional<TokenGather> begin_gather(const TokenRuns& runs, const variable_list& saved) const {
    const QuantizedOperand shard{saved[0], saved[1], saved[2], Tensor()};
    const bool columnwise = !recipe().specs[kWgradX].is_of_forward();
    if (!gathered_) return TokenGather(*layers_.sharding, runs, shard, columnwise);
    gathered_->begin(*layers_.sharding, runs, shard, columnwise);
    return std::nullopt;
  }

  struct LayerGradients {
    Tensor x, weight, bias;
  };

  // Computes one layer's gradients. x: for wgrad; prepared in place where a group shares x.
  LayerGradients layer_backward(std::size_t i, const Tensor& grad, ProductInput& x,
                                const variable_list& saved) const {
    const SavedLayers& layers = layers_;
    const Tensor g = as_matrix("linear", "gradient", grad);
    const SymInt m = g.sym_size(0), n = g.sym_size(1);
    const PlannedProduct dgrad = layers.dgrad(g.device()), wgrad = layers.wgrad(g.device());
    const Sharding* sharding = layers.sharding ? &*layers.sharding : nullptr;
    const OperandUse row{kDgradG, needs_.dx, !sharding && dgrad.reads_values()};
    const OperandUse col{kWgradG, needs_.dw[i], !sharding && wgrad.reads_values()};
    LayerGradients out;
    Directions of_g = quantize_both(recipe(), g, row, col, layers.state_of_rows(i));
    const bool is_cut = sharding && sharding->token_dim;
    const TokenRuns runs = is_cut ? token_runs(*sharding, x_shape_) : TokenRuns{};
    // x is gathered beside dgrad, and dx is summed beside wgrad.
    std::optional<TokenGather> gather;
    if (col.is_needed && is_cut) gather = begin_gather(runs, saved);
    if (row.is_needed)
      out.x = input_gradient(layers, of_g.first, row, saved_weight(layers, saved, i), n,
                             g.scalar_type(), g.device());
    of_g.first = {};  // its memory may serve wgrad
    const bool is_sum = row.is_needed && sharding && (is_cut || sharding->sums_dx);
    if (is_sum)
      out.x =
          is_cut ? begin_scatter_sum(*sharding, runs, out.x) : begin_sum(sharding->group, out.x);
    if (col.is_needed) {
      if (is_cut) x = backward_input(layers, gather ? gather->finish() : gathered_->get(), kWgradX);
      if (layers.product_dtypes.size() > 1)
        x = prepare_input(wgrad, recipe().recipe.wgrad.b, std::move(x), m);
      out.weight = weight_gradient(layers, i, of_g.second, col, x, m, g.device(), 1 + i);
    }
    if (is_sum) out.x = wait_for(out.x);
    const int bias = layers.bias_index[i];
    if (bias >= 0 && needs_.db[static_cast<std::size_t>(bias)])
      out.bias = bias_gradient(layers, bias, g);
    return out;
  }

  SavedLayers layers_;
  std::vector<SymInt> x_shape_;
  NeededGradients needs_;
  c10::intrusive_ptr<GatheredInput> gathered_;
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
