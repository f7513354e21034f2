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
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "layers/arguments.h"
#include "layers/double_backward.h"
#include "layers/layer_call.h"
#include "layers/operands.h"
#include "layers/passes.h"
#include "layers/read_again.h"
#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/op.h"

namespace minifloat {
namespace {

using namespace torch_ops;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Results of a forward pass that the backward pass reads. saved: x as wgrad reads it, then each
// weight as dgrad reads it, three tensors each
struct ForBackward {
  variable_list saved;
  bool records_amaxes = false;  // whether backward writes forward's amaxes
  PendingAmaxes amaxes = {};
};

// Runs the forward pass. backward: null where no gradient is needed
std::vector<Tensor> forward_pass(const Tensor& x, const Layers& layers,
                                 const PreparedRecipe& prepared, const Needs& needs,
                                 ForBackward* backward) {
  const Sharding* sharding = layers.shards.sharding;
  PendingAmaxes pending;
  const ForwardPass pass = {.prepared = prepared,
                            .layers = layers,
                            .needs = needs,
                            .dtype = x.scalar_type(),
                            .k = x.sym_size(-1),
                            .amaxes = pending,
                            .saved = backward ? &backward->saved : nullptr};
  const Needed row{kFpropX, true, !sharding && pass.fprop().reads_values()},
      col{kWgradX, needs.any_dw};
  const auto [rowwise, columnwise] = input_operands(pass, "linear", x, row, col);
  pass.save(columnwise, kWgradX);
  std::vector<Tensor> outputs =
      multiply_weights(pass, forward_input(pass, rowwise, row, !layers.prequantized.x.empty()));
  for (Tensor& y : outputs) y = as_output(std::move(y), x, sharding);
  if (backward && backward->records_amaxes)
    backward->amaxes = std::move(pending);
  else
    record(pending);
  return outputs;
}

// Values that backward reads besides the saved tensors; the context holds them.
struct BackwardState {
  LayersState layers;
  ReadAgain again;
  std::vector<SymInt> x_shape;
  Needs needs;
  std::optional<Sharding> sharding;
  c10::intrusive_ptr<GatheredInput> gathered;
  PendingAmaxes amaxes;
};

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, at::TensorList weights,
                               at::TensorList biases, const std::vector<int>& bias_index,
                               const PreparedRecipe& recipe, at::TensorList rng,
                               at::TensorList histories, const std::vector<std::int64_t>& streams,
                               bool recomputes_weights, const Prequantized& prequantized,
                               const Shards& shards, const WeightSums& sums, const Needs& needs) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const Layers layers{weights,   biases,  bias_index,         rng,
                        histories, streams, recomputes_weights, prequantized,
                        shards,    sums};
    // A trace with DTensor inputs accepts writes to a tensor from one pass alone (torch 2.11).
    const bool is_traced =
        shards.sharding && !histories.empty() && !can_skip_dispatcher({&histories[0]});
    ForBackward found{.saved = {}, .records_amaxes = is_traced};
    variable_list outputs = forward_pass(x, layers, recipe, needs, &found);
    ctx->save_for_backward(std::move(found.saved));
    ctx->saved_data["state"] = save_state(x, layers, recipe, needs, std::move(found.amaxes));
    return outputs;
  }

  // The state that `backward` reads, in a capsule: the context stores no structs.
  struct Capsule : torch::CustomClassHolder {
    explicit Capsule(BackwardState r) : value(std::move(r)) {}
    BackwardState value;
  };
  static c10::IValue save_state(const Tensor& x, const Layers& layers, const PreparedRecipe& recipe,
                                const Needs& needs, PendingAmaxes amaxes) {
    BackwardState r{.layers = LayersState(layers, recipe, x.scalar_type()),
                    .again = {},
                    .x_shape = x.sym_sizes().vec(),
                    .needs = needs,
                    .sharding = {},
                    .gathered = layers.shards.gathered,
                    .amaxes = std::move(amaxes)};
    r.again.add_rng(layers.rng);
    r.again.add_histories(layers.histories);
    if (layers.shards.sharding) r.sharding = *layers.shards.sharding;
    return c10::IValue::make_capsule(c10::make_intrusive<Capsule>(std::move(r)));
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto capsule = ctx->saved_data["state"].toCapsule();
    const BackwardState& r = static_cast<const Capsule*>(capsule.get())->value;
    const variable_list saved = r.again.saved_tensors("linear", *ctx, grads);
    variable_list gradients = first_derivatives(r, saved, grads);
    if (!at::GradMode::is_enabled()) return gradients;
    const auto node = torch::autograd::get_current_node();
    return refuse_double_backward("linear", r.layers.recipe.text, *node, grads,
                                  std::move(gradients));
  }

  // Returns the gradients of x, weights, biases, bias_index, recipe, rng, histories, streams,
  // recomputes_weights, prequantized, shards, sums, needs; undefined where there is none.
  static variable_list first_derivatives(const BackwardState& r, const variable_list& saved,
                                         const variable_list& grads) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const LayersState& layers = r.layers;
    const std::size_t n = grads.size();
    record(r.amaxes);
    const std::size_t biases = layers.bias_dtypes.size();
    variable_list out(1 + n + biases + 2 + layers.rng.size() + layers.histories.size() + 6);
    ProductInput x = saved_input(layers, saved, 0, kWgradX);
    for (std::size_t i = 0; i < n; ++i) {
      if (!grads[i].defined()) continue;
      const LayerGradients d = layer_backward(r, i, grads[i], x, saved);
      if (d.x.defined()) out[0] = out[0].defined() ? out[0] + d.x : d.x;
      out[1 + i] = d.weight;
      if (d.bias.defined()) out[1 + n + static_cast<std::size_t>(layers.bias_index[i])] = d.bias;
    }
    if (out[0].defined() && r.x_shape.size() != 2) out[0] = out[0].view_symint(r.x_shape);
    return out;
  }

  // Returns x as wgrad reads x, with the tokens of all ranks.
  static ProductInput gathered_input(const BackwardState& r, const TokenRuns& runs,
                                     const ProductInput& x) {
    const InputTensors t = tensors_of(x);
    const auto or_none = [](const Tensor* tensor) { return tensor ? *tensor : Tensor(); };
    const QuantizedOperand shard{*t.elements, or_none(t.scale), or_none(t.amax), Tensor()};
    const QuantizedOperand whole =
        r.gathered ? r.gathered->get(*r.sharding, runs, shard)
                   : gather_tokens(*r.sharding, runs, shard, /*columnwise=*/true);
    return cast_input(r.layers.recipe.recipe.wgrad.b, whole.codes, whole.scale, whole.amax);
  }

  struct LayerGradients {
    Tensor x, weight, bias;
  };

  // Computes one layer's gradients. x: for wgrad; prepared in place where a group shares x.
  static LayerGradients layer_backward(const BackwardState& r, std::size_t i, const Tensor& grad,
                                       ProductInput& x, const variable_list& saved) {
    const LayersState& layers = r.layers;
    const PreparedRecipe& prepared = layers.recipe;
    const Recipe& recipe = prepared.recipe;
    const Tensor g = as_matrix("linear", "gradient", grad);
    const SymInt m = g.sym_size(0), n = g.sym_size(1);
    const PlannedProduct dgrad = plan_product(recipe.dgrad, prepared.dgrad, g.device()),
                         wgrad = plan_product(recipe.wgrad, prepared.wgrad, g.device());
    const Sharding* sharding = r.sharding ? &*r.sharding : nullptr;
    const Needed row{kDgradG, r.needs.dx, !sharding && dgrad.reads_values()};
    const Needed col{kWgradG, r.needs.dw[i], !sharding && wgrad.reads_values()};
    LayerGradients out;
    Directions of_g = quantize_both(prepared, g, row, col, layers.state_of(i, sharding));
    const bool is_cut = sharding && sharding->token_dim;
    const TokenRuns runs = is_cut ? token_runs(*sharding, r.x_shape) : TokenRuns{};
    if (row.is_needed)
      out.x = input_gradient(layers, of_g.first, row, saved_weight(layers, saved, i, sharding), n,
                             g.scalar_type(), g.device());
    of_g.first = {};  // its memory may serve wgrad
    if (row.is_needed && is_cut) out.x = scatter_sum(*sharding, runs, out.x);
    if (col.is_needed) {
      if (is_cut) x = gathered_input(r, runs, x);
      if (layers.product_dtypes.size() > 1)
        x = prepare_input(wgrad, recipe.wgrad.b, std::move(x), m);
      out.weight = weight_gradient(layers, i, of_g.second, col, x, m, g.device(), 1 + i);
    }
    const int bias = layers.bias_index[i];
    if (bias >= 0 && r.needs.db[static_cast<std::size_t>(bias)])
      out.bias = bias_gradient(layers, bias, g);
    return out;
  }
};

}  // namespace
}  // namespace minifloat

template <>
void torch::autograd::CppNode<minifloat::LinearFunction>::compiled_args(
    torch::dynamo::autograd::CompiledNodeArgs&) const {
  minifloat::torch_ops::refuse_compiled_autograd("linear");
}

namespace minifloat {
namespace {

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
  const Needs needs(x, layers);
  if (!needs.any()) return forward_pass(x, layers, prepared, needs, nullptr);
  return LinearFunction::apply(x, layers.weights, layers.biases, layers.bias_index, prepared,
                               layers.rng, layers.histories, layers.streams,
                               layers.recomputes_weights, layers.prequantized, layers.shards,
                               layers.sums, needs);
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
