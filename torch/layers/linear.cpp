// Linear layers under a recipe, differentiable. One function serves a layer and a group of layers
// that share their input:
//
//     forward    x  -> rowwise for fprop, columnwise for wgrad        one read
//                W  -> rowwise for fprop, columnwise for dgrad        one read
//                y  = x · Wᵀ                                          for each W
//     saved      x columnwise and W columnwise, in their specs: high precision where a spec is bf16
//     backward   g  -> rowwise for dgrad, columnwise for wgrad        one read
//                dx = g · W     (the sum over the group),     dW = gᵀ · x
//
// Operands that no gradient needs are neither computed nor saved. The op is composite: the
// dispatcher sees quantize and scaled_mm below the op.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "layers/arguments.h"
#include "layers/double_backward.h"
#include "layers/operands.h"
#include "layers/sharding.h"
#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/tangents.h"

namespace minifloat {
namespace {

using namespace torch_ops;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Quantizes x of a forward pass: rowwise as fprop reads x, columnwise as backward reads x.
Directions input_operands(const PreparedRecipe& prepared, const Layers& layers, const Tensor& x,
                          const Tensor& matrix, const Needed& row, const Needed& col,
                          const ModuleState& state) {
  const Sharding* sharding = layers.shards.sharding;
  const bool is_cut = sharding && sharding->token_dim;
  if (const at::TensorList tensors = layers.prequantized.x; !tensors.empty()) {
    const SymInt m = matrix.sym_size(0) * (is_cut ? sharding->ranks : 1);
    return prequantized_both(prepared, "linear", "x_operands", tensors, matrix, m, row, col);
  }
  Directions out = quantize_both(prepared, matrix, row, col, state);
  if (is_cut)
    out.first = gather_tokens(*sharding, token_runs(*sharding, x.sym_sizes()), out.first, false);
  return out;
}

// Returns y (M, N) with the leading dimensions of x; x may have the tokens of one rank.
Tensor as_output(Tensor y, const Tensor& x, const Sharding* sharding) {
  if (x.dim() == 2) return y;
  c10::SymDimVector shape(x.sym_sizes().begin(), x.sym_sizes().end());
  shape.back() = y.sym_size(1);
  if (sharding && sharding->token_dim) {
    SymInt& tokens = shape[static_cast<std::size_t>(*sharding->token_dim)];
    tokens = tokens * sharding->ranks;
  }
  return y.view_symint(shape);
}

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
  const Recipe& recipe = prepared.recipe;
  const Sharding* sharding = layers.shards.sharding;
  const PlannedProduct fprop = plan_product(recipe.fprop, prepared.fprop, x.device());
  const bool exact = !sharding && fprop.reads_values();
  const Tensor matrix = as_matrix("linear", "x", x);
  share_version(matrix, x);
  const SymInt k = x.sym_size(-1);
  const at::TensorList weight_operands = layers.prequantized.weight;

  PendingAmaxes pending;
  const auto state_of = [&](std::size_t i) {
    ModuleState state = layers.state_of(i);
    state.pending = &pending;
    return state;
  };
  const Needed x_row{kFpropX, true, exact}, x_col{kWgradX, needs.any_dw};
  const auto [rowwise, columnwise] =
      input_operands(prepared, layers, x, matrix, x_row, x_col, state_of(0));
  // Saves an operand, except an amax that the spec lacks: recomputed forwards save as many tensors.
  const auto save = [&](const QuantizedOperand& operand, Place place) {
    const Spec& spec = prepared.specs[place];
    const bool has_amax = spec.has_tensor_amax() || spec.has_row_amax();
    if (backward)
      backward->saved.insert(backward->saved.end(),
                             {operand.codes, operand.scale, has_amax ? operand.amax : Tensor()});
  };
  save(columnwise, kWgradX);

  ProductInput left = layers.prequantized.x.empty() ? product_input(prepared, rowwise, x_row)
                                                    : prequantized_input(prepared, rowwise, x_row);
  if (layers.weights.size() > 1) left = prepare_input(fprop, recipe.fprop.a, std::move(left), k);
  std::vector<Tensor> outputs;
  for (std::size_t i = 0; i < layers.weights.size(); ++i) {
    const bool has_codes = !weight_operands.empty();
    const Needed w_row{kFpropW, true, exact && !has_codes}, w_col{kDgradW, needs.dx};
    const bool reads_weight =
        !has_codes || recipe.fprop.b.is_bf16() || (needs.dx && recipe.dgrad.b.is_bf16());
    if (reads_weight) bridge::check_memory_if_real("linear", "weight", layers.weights[i]);
    const Tensor weight =
        reads_weight ? to_dtype(layers.weights[i], x.scalar_type()) : layers.weights[i];
    const Directions w =
        has_codes ? prequantized_both(prepared, "linear", "weight_operands", weight_operands,
                                      weight, weight.sym_size(0), w_row, w_col)
                  : quantize_both(prepared, weight, w_row, w_col, state_of(i));
    if (has_codes) record_amaxes(prepared, w_row, w_col, state_of(i), w, false);
    save(w.second, kDgradW);
    // On one rank, where y is a sum over the ranks.
    const bool adds_bias = !sharding || sharding->weight_dim == 0 || sharding->rank == 0;
    const ProductInput right = has_codes ? prequantized_input(prepared, w.first, w_row)
                                         : product_input(prepared, w.first, w_row);
    Tensor y = scaled_mm(fprop, left, right, k, adds_bias ? layers.bias_of(i) : std::nullopt,
                         x.scalar_type());
    outputs.push_back(as_output(std::move(y), x, sharding));
  }
  if (backward && backward->records_amaxes)
    backward->amaxes = std::move(pending);
  else
    record(pending);
  return outputs;
}

// Values that backward reads besides the saved tensors; the context holds them.
struct BackwardState {
  const PreparedRecipe& recipe;
  std::int64_t stream;
  std::vector<SymInt> x_shape;
  // Dtypes of dW as the product writes it: the weight's after autocast. A weight that is no tensor
  // subclass and whose codes the caller passes is not cast: its dW has x's dtype.
  std::vector<at::ScalarType> product_dtypes;
  std::vector<at::ScalarType> weight_dtypes, bias_dtypes;
  std::vector<int> bias_index;
  Needs needs;
  // No saved variables: backward writes histories, and a recomputed forward may not replace rng.
  variable_list histories, rng;
  std::vector<std::uint32_t> rng_versions;
  std::optional<Sharding> sharding;
  c10::intrusive_ptr<GatheredInput> gathered;
  PendingAmaxes amaxes;
};

std::uint32_t version_of(const Tensor& t) { return t.is_inference() ? 0 : t._version(); }

void check_rng_is_unchanged(const BackwardState& r) {
  for (std::size_t i = 0; i < r.rng.size(); ++i)
    TORCH_CHECK(version_of(r.rng[i]) == r.rng_versions[i],
                "linear: expected rng as forward read it, got one that was modified by an inplace "
                "operation since; backward draws from it too");
}

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, at::TensorList weights,
                               at::TensorList biases, const std::vector<int>& bias_index,
                               const PreparedRecipe& recipe, at::TensorList rng,
                               at::TensorList histories, std::int64_t stream,
                               const Prequantized& prequantized, const Shards& shards,
                               const Needs& needs) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const Layers layers{weights, biases, bias_index, rng, histories, stream, prequantized, shards};
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
    BackwardState r{.recipe = recipe,
                    .stream = layers.stream,
                    .x_shape = x.sym_sizes().vec(),
                    .product_dtypes = {},
                    .weight_dtypes = {},
                    .bias_dtypes = {},
                    .bias_index = layers.bias_index,
                    .needs = needs,
                    .histories = layers.histories.vec(),
                    .rng = layers.rng.vec(),
                    .rng_versions = {},
                    .sharding = {},
                    .gathered = layers.shards.gathered,
                    .amaxes = std::move(amaxes)};
    if (layers.shards.sharding) r.sharding = *layers.shards.sharding;
    for (const Tensor& rng : r.rng) r.rng_versions.push_back(version_of(rng));
    for (const Tensor& w : layers.weights) {
      r.weight_dtypes.push_back(w.scalar_type());
      const bool is_cast =
          layers.prequantized.weight.empty() || w.key_set().has(c10::DispatchKey::Python);
      r.product_dtypes.push_back(is_cast ? w.scalar_type() : x.scalar_type());
    }
    for (const Tensor& b : layers.biases) r.bias_dtypes.push_back(b.scalar_type());
    return c10::IValue::make_capsule(c10::make_intrusive<Capsule>(std::move(r)));
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto capsule = ctx->saved_data["state"].toCapsule();
    const BackwardState& r = static_cast<const Capsule*>(capsule.get())->value;
    // Unpacking may run a checkpointed forward pass again, which records its own graph.
    const variable_list saved = ctx->get_saved_variables();
    check_rng_is_unchanged(r);
    variable_list gradients = first_derivatives(r, saved, grads);
    if (!at::GradMode::is_enabled()) return gradients;
    const auto node = torch::autograd::get_current_node();
    return refuse_double_backward(r.recipe.text, *node, grads, std::move(gradients));
  }

  // Returns the gradients of x, weights, biases, bias_index, recipe, rng, histories, stream,
  // prequantized, shards, needs; undefined where there is none.
  static variable_list first_derivatives(const BackwardState& r, const variable_list& saved,
                                         const variable_list& grads) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const std::size_t n = grads.size();
    record(r.amaxes);
    const auto operand = [&](std::size_t i, const Spec& spec) {
      return cast_input(spec, saved[3 * i], saved[3 * i + 1], saved[3 * i + 2]);
    };
    const Layers layers{.weights = {},
                        .biases = {},
                        .bias_index = r.bias_index,
                        .rng = r.rng,
                        .histories = r.histories,
                        .stream = r.stream,
                        .prequantized = {},
                        .shards = {r.sharding ? &*r.sharding : nullptr, {}}};
    const std::size_t biases = r.bias_dtypes.size();

    variable_list out(1 + n + biases + 2 + layers.rng.size() + layers.histories.size() + 4);
    const Recipe& recipe = r.recipe.recipe;
    ProductInput x = operand(0, recipe.wgrad.b);
    for (std::size_t i = 0; i < n; ++i) {
      if (!grads[i].defined()) continue;
      const LayerGradients d =
          layer_backward(r, layers, i, grads[i], x, operand(i + 1, recipe.dgrad.b), n > 1);
      if (d.x.defined()) out[0] = out[0].defined() ? out[0] + d.x : d.x;
      out[1 + i] = d.weight;
      if (d.bias.defined()) out[1 + n + r.bias_index[i]] = d.bias;
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
    return cast_input(r.recipe.recipe.wgrad.b, whole.codes, whole.scale, whole.amax);
  }

  struct LayerGradients {
    Tensor x, weight, bias;
  };

  // Computes one layer's gradients. x: for wgrad; prepared in place where a group shares x.
  static LayerGradients layer_backward(const BackwardState& r, const Layers& layers, std::size_t i,
                                       const Tensor& grad, ProductInput& x, const ProductInput& w,
                                       bool shared) {
    const PreparedRecipe& prepared = r.recipe;
    const Recipe& recipe = prepared.recipe;
    const Tensor g = as_matrix("linear", "gradient", grad);
    const SymInt m = g.sym_size(0), n = g.sym_size(1);
    const PlannedProduct dgrad = plan_product(recipe.dgrad, prepared.dgrad, g.device()),
                         wgrad = plan_product(recipe.wgrad, prepared.wgrad, g.device());
    const bool is_whole = !layers.shards.sharding;
    const Needed row{kDgradG, r.needs.dx, is_whole && dgrad.reads_values()};
    const Needed col{kWgradG, r.needs.dw[i], is_whole && wgrad.reads_values()};
    LayerGradients out;
    const auto [rowwise, columnwise] = quantize_both(prepared, g, row, col, layers.state_of(i));
    const Sharding* sharding = layers.shards.sharding;
    const bool is_cut = sharding && sharding->token_dim;
    const TokenRuns runs = is_cut ? token_runs(*sharding, r.x_shape) : TokenRuns{};
    if (row.is_needed)
      out.x = scaled_mm(dgrad, product_input(prepared, rowwise, row), w, n, std::nullopt,
                        g.scalar_type());
    if (row.is_needed && is_cut) out.x = scatter_sum(*sharding, runs, out.x);
    if (col.is_needed) {
      if (is_cut) x = gathered_input(r, runs, x);
      if (shared) x = prepare_input(wgrad, recipe.wgrad.b, std::move(x), m);
      out.weight = to_dtype(scaled_mm(wgrad, product_input(prepared, columnwise, col), x, m,
                                      std::nullopt, r.product_dtypes[i]),
                            r.weight_dtypes[i]);
    }
    const int bias = r.bias_index[i];
    if (bias >= 0 && r.needs.db[bias])
      out.bias = to_dtype(g.sum(0, false, at::kFloat), r.bias_dtypes[bias]);
    return out;
  }
};

std::vector<Tensor> apply(const Tensor& x, const Layers& layers, const std::string& recipe) {
  const PreparedRecipe& prepared = prepare(recipe);
  check_layers(x, layers, prepared);
  check_no_tangent("linear", "x", x);
  for (const Tensor& w : layers.weights) check_no_tangent("linear", "weight", w);
  for (const Tensor& b : layers.biases) check_no_tangent("linear", "bias", b);
  const Needs needs(x, layers);
  if (!needs.any()) return forward_pass(x, layers, prepared, needs, nullptr);
  return LinearFunction::apply(x, layers.weights, layers.biases, layers.bias_index, prepared,
                               layers.rng, layers.histories, layers.stream, layers.prequantized,
                               layers.shards, needs);
}

Tensor linear_kernel(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                     const std::string& recipe, const std::optional<Tensor>& rng,
                     const std::optional<Tensor>& amax_history, std::int64_t stream,
                     const std::optional<at::TensorList>& x_operands,
                     const std::optional<at::TensorList>& weight_operands) {
  const Layers layers{.weights = weight,
                      .biases = list_of(bias),
                      .bias_index = {bias ? 0 : -1},
                      .rng = list_of(rng),
                      .histories = list_of(amax_history),
                      .stream = stream,
                      .prequantized = {x_operands.value_or(at::TensorList()),
                                       weight_operands.value_or(at::TensorList())},
                      .shards = {}};
  return apply(x, layers, recipe).front();
}

Tensor linear_sharded_kernel(const Tensor& x, const Tensor& weight,
                             const std::optional<Tensor>& bias, const std::string& recipe,
                             const std::string& group, std::int64_t rank, std::int64_t ranks,
                             std::int64_t weight_dim, std::optional<std::int64_t> token_dim,
                             const std::optional<Tensor>& rng,
                             const std::optional<Tensor>& amax_history, std::int64_t stream,
                             const std::optional<at::TensorList>& x_operands,
                             const std::optional<at::TensorList>& weight_operands,
                             const std::optional<c10::intrusive_ptr<GatheredInput>>& gathered) {
  const Sharding sharding{group, rank, ranks, weight_dim, token_dim};
  const Layers layers{
      .weights = weight,
      .biases = list_of(bias),
      .bias_index = {bias ? 0 : -1},
      .rng = list_of(rng),
      .histories = list_of(amax_history),
      .stream = stream,
      .prequantized = {x_operands.value_or(at::TensorList()),
                       weight_operands.value_or(at::TensorList())},
      .shards = {&sharding, gathered.value_or(c10::intrusive_ptr<GatheredInput>())}};
  return apply(x, layers, recipe).front();
}

std::vector<Tensor> linear_group_kernel(const Tensor& x, at::TensorList weights,
                                        const c10::List<std::optional<Tensor>>& biases,
                                        const std::string& recipe,
                                        const std::optional<at::TensorList>& rng,
                                        const std::optional<at::TensorList>& amax_history) {
  std::vector<Tensor> present;
  std::vector<int> index;
  for (const std::optional<Tensor> bias : biases) {
    index.push_back(bias ? static_cast<int>(present.size()) : -1);
    if (bias) present.push_back(*bias);
  }
  const Layers layers{.weights = weights,
                      .biases = present,
                      .bias_index = index,
                      .rng = rng.value_or(at::TensorList()),
                      .histories = amax_history.value_or(at::TensorList()),
                      .stream = 0,
                      .prequantized = {},
                      .shards = {}};
  return apply(x, layers, recipe);
}

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, CompositeImplicitAutograd, m) {
  register_gathered_input();
  m.impl("linear", linear_kernel);
  m.impl("linear_group", linear_group_kernel);
  m.impl("linear_sharded", linear_sharded_kernel);
}

}  // namespace minifloat
