// Linear layers under a recipe, differentiable. One function serves a layer and a group of layers that share
// their input:
//
//     forward    x  -> rowwise for fprop, columnwise for wgrad        one read
//                W  -> rowwise for fprop, columnwise for dgrad        one read
//                y  = x · Wᵀ                                          for each W
//     saved      x columnwise and W columnwise, in their specs; nothing in high precision unless a spec is bf16
//     backward   g  -> rowwise for dgrad, columnwise for wgrad        one read
//                dx = g · W     (the sum over the group),     dW = gᵀ · x
//
// What no gradient asks for is neither computed nor kept. The op is composite: what the dispatcher sees below
// it are quantize and scaled_mm.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "layers/operands.h"
#include "ops/bridge.h"
#include "ops/ops.h"
#include "ops/plain.h"
#include "ops/tangents.h"

namespace minifloat {
namespace {

using namespace torch_ops;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What a caller has quantized before (layer_operands); empty: nothing. Of a layer alone, not of a group.
struct Given {
  at::TensorList x, weight;
};

// The arguments of the layers, as the autograd function takes them, which is with defined tensors only. rng and
// histories are empty, or one a weight.
struct Layers {
  at::TensorList weights;
  at::TensorList biases;        // those that there are
  std::vector<int> bias_index;  // of each weight's among them; -1: none
  at::TensorList rng, histories;
  std::int64_t stream = 0;
  Given given;

  std::optional<Tensor> bias_of(std::size_t i) const {
    return bias_index[i] < 0 ? std::nullopt : std::optional(biases[bias_index[i]]);
  }
  ModuleState state_of(std::size_t i) const {
    return {rng.empty() ? Tensor() : rng[i], stream, histories.empty() ? Tensor() : histories[i]};
  }
};

// Which gradients are asked for.
struct Needs {
  bool dx = false;
  bool any_dw = false;
  std::vector<bool> dw, db;

  Needs(const Tensor& x, const Layers& layers) {
    const bool on = at::GradMode::is_enabled();
    dx = on && x.requires_grad();
    for (const Tensor& w : layers.weights) dw.push_back(on && w.requires_grad());
    for (const Tensor& b : layers.biases) db.push_back(on && b.requires_grad());
    for (const bool needed : dw) any_dw = any_dw || needed;
  }
};

// The forward pass. saved: x as wgrad reads it, then each weight as dgrad reads it (three tensors each).
std::vector<Tensor> forward_pass(const Tensor& x, const Layers& layers,
                                 const PreparedRecipe& prepared, const Needs& needs,
                                 variable_list* saved) {
  const Recipe& recipe = prepared.recipe;
  const PlannedProduct fprop = plan_product(recipe.fprop, prepared.fprop, x.device());
  const bool exact = fprop.reads_values();
  const Tensor matrix = as_matrix(x);
  share_version(matrix, x);
  const SymInt k = x.sym_size(-1);
  const Given& given = layers.given;

  PendingAmaxes pending;
  const auto state_of = [&](std::size_t i) {
    ModuleState state = layers.state_of(i);
    state.pending = &pending;
    return state;
  };
  const Wanted x_row{kFpropX, true, exact}, x_col{kWgradX, needs.any_dw};
  const auto [rowwise, columnwise] =
      given.x.empty() ? quantize_both(prepared, matrix, x_row, x_col, state_of(0))
                      : given_both(prepared, "x_operands", given.x, matrix, x_row, x_col);
  const auto save = [&](const QuantizedOperand& operand) {
    if (saved) saved->insert(saved->end(), {operand.codes, operand.scale, operand.amax});
  };
  save(columnwise);

  ProductInput left = given.x.empty() ? product_input(prepared, rowwise, x_row)
                                      : given_input(prepared, rowwise, x_row);
  if (layers.weights.size() > 1) left = prepare_input(fprop, recipe.fprop.a, std::move(left), k);
  std::vector<Tensor> outputs;
  for (std::size_t i = 0; i < layers.weights.size(); ++i) {
    const Wanted w_row{kFpropW, true, exact && given.weight.empty()}, w_col{kDgradW, needs.dx};
    const bool has_values =
        given.weight.empty() || recipe.fprop.b.is_bf16() || (needs.dx && recipe.dgrad.b.is_bf16());
    if (has_values) bridge::check_memory_if_real("linear", "weight", layers.weights[i]);
    const Tensor weight =
        has_values ? to_dtype(layers.weights[i], x.scalar_type()) : layers.weights[i];
    const auto [w_rowwise, w_columnwise] =
        given.weight.empty()
            ? quantize_both(prepared, weight, w_row, w_col, state_of(i))
            : given_both(prepared, "weight_operands", given.weight, weight, w_row, w_col);
    save(w_columnwise);
    const ProductInput right = given.weight.empty() ? product_input(prepared, w_rowwise, w_row)
                                                    : given_input(prepared, w_rowwise, w_row);
    Tensor y = scaled_mm(fprop, left, right, k, layers.bias_of(i), x.scalar_type());
    if (x.dim() != 2) {
      c10::SymDimVector shape(x.sym_sizes().begin(), x.sym_sizes().end());
      shape.back() = weight.sym_size(0);
      y = y.view_symint(shape);
    }
    outputs.push_back(std::move(y));
  }
  record(pending);
  return outputs;
}

// What backward must know besides tensors; lives in the context.
struct Remembered {
  const PreparedRecipe& recipe;
  std::int64_t stream;
  std::vector<SymInt> x_shape;
  // Of dW as the product gives it. A given weight was quantized in x's dtype, and so is its gradient, rounded there
  // before it takes the weight's dtype: as autocast has it.
  std::vector<at::ScalarType> product_dtypes;
  std::vector<at::ScalarType> weight_dtypes, bias_dtypes;
  std::vector<int> bias_index;
  Needs needs;
  // Not saved variables: backward writes the histories, and a recomputed forward must not replace rng.
  variable_list histories, rng;
  std::vector<std::uint32_t> rng_versions;
};

std::uint32_t version_of(const Tensor& t) { return t.is_inference() ? 0 : t._version(); }

void check_rng_is_unchanged(const Remembered& r) {
  for (std::size_t i = 0; i < r.rng.size(); ++i)
    TORCH_CHECK(version_of(r.rng[i]) == r.rng_versions[i],
                "linear: expected rng as forward read it, got one that was modified by an inplace "
                "operation since; backward draws from it too");
}

// Gradients of a quantized product are not differentiable: a function of codes has no derivative. Gives them a history
// that raises wherever a second derivative would pass on to what they were computed from: the inputs of `node`, whose
// backward this is, and the gradients of its outputs.
variable_list refuse_double_backward(const std::string& recipe, const torch::autograd::Node& node,
                                     const variable_list& grads, variable_list gradients) {
  torch::autograd::edge_list inputs = node.next_edges();
  for (const Tensor& g : grads)
    if (g.defined() && g.requires_grad()) inputs.push_back(torch::autograd::impl::gradient_edge(g));
  const auto error = std::make_shared<torch::autograd::Error>(
      "linear: expected no second derivative through a quantized product (recipe " + recipe +
          "), got one: the backward pass of minifloat's layers is not differentiable. Leave the "
          "layers that a double backward passes through in high precision, by filter_fqns or a "
          "recipe map",
      std::move(inputs));
  for (Tensor& gradient : gradients) {
    if (!gradient.defined()) continue;
    gradient = gradient.detach();
    torch::autograd::set_history(gradient, error);
  }
  return gradients;
}

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, at::TensorList weights,
                               at::TensorList biases, const std::vector<int>& bias_index,
                               const PreparedRecipe& recipe, at::TensorList rng,
                               at::TensorList histories, std::int64_t stream, const Given& given,
                               const Needs& needs) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const Layers layers{weights, biases, bias_index, rng, histories, stream, given};
    variable_list saved;
    variable_list outputs = forward_pass(x, layers, recipe, needs, &saved);
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["remembered"] = remember(x, layers, recipe, needs);
    return outputs;
  }

  // What `backward` reads back; a capsule, because the context stores plain values.
  struct Capsule : torch::CustomClassHolder {
    explicit Capsule(Remembered r) : value(std::move(r)) {}
    Remembered value;
  };
  static c10::IValue remember(const Tensor& x, const Layers& layers, const PreparedRecipe& recipe,
                              const Needs& needs) {
    Remembered r{.recipe = recipe,
                 .stream = layers.stream,
                 .x_shape = x.sym_sizes().vec(),
                 .product_dtypes = {},
                 .weight_dtypes = {},
                 .bias_dtypes = {},
                 .bias_index = layers.bias_index,
                 .needs = needs,
                 .histories = layers.histories.vec(),
                 .rng = layers.rng.vec(),
                 .rng_versions = {}};
    for (const Tensor& rng : r.rng) r.rng_versions.push_back(version_of(rng));
    for (const Tensor& w : layers.weights) {
      r.weight_dtypes.push_back(w.scalar_type());
      r.product_dtypes.push_back(layers.given.weight.empty() ? w.scalar_type() : x.scalar_type());
    }
    for (const Tensor& b : layers.biases) r.bias_dtypes.push_back(b.scalar_type());
    return c10::IValue::make_capsule(c10::make_intrusive<Capsule>(std::move(r)));
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto capsule = ctx->saved_data["remembered"].toCapsule();
    const Remembered& r = static_cast<const Capsule*>(capsule.get())->value;
    // Unpacking may run a checkpointed forward pass again, which records its own graph.
    const variable_list saved = ctx->get_saved_variables();
    check_rng_is_unchanged(r);
    variable_list gradients = first_derivatives(r, saved, grads);
    if (!at::GradMode::is_enabled()) return gradients;
    const auto node = torch::autograd::get_current_node();
    return refuse_double_backward(r.recipe.text, *node, grads, std::move(gradients));
  }

  // Of x, weights, biases, bias_index, recipe, rng, histories, stream, given, needs: undefined where there is none.
  static variable_list first_derivatives(const Remembered& r, const variable_list& saved,
                                         const variable_list& grads) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const std::size_t n = grads.size();
    const auto operand = [&](std::size_t i, const Spec& spec) {
      return cast_input(spec, saved[3 * i], saved[3 * i + 1], saved[3 * i + 2]);
    };
    const Layers layers{.weights = {},
                        .biases = {},
                        .bias_index = r.bias_index,
                        .rng = r.rng,
                        .histories = r.histories,
                        .stream = r.stream,
                        .given = {}};
    const std::size_t biases = r.bias_dtypes.size();

    variable_list out(1 + n + biases + 2 + layers.rng.size() + layers.histories.size() + 3);
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

  struct LayerGradients {
    Tensor x, weight, bias;
  };

  // x: as wgrad reads it; made ready in place where the whole group is going to read it.
  static LayerGradients layer_backward(const Remembered& r, const Layers& layers, std::size_t i,
                                       const Tensor& grad, ProductInput& x, const ProductInput& w,
                                       bool shared) {
    const PreparedRecipe& prepared = r.recipe;
    const Recipe& recipe = prepared.recipe;
    const Tensor g = as_matrix(grad, "gradient");
    const SymInt m = g.sym_size(0), n = g.sym_size(1);
    const PlannedProduct dgrad = plan_product(recipe.dgrad, prepared.dgrad, g.device()),
                         wgrad = plan_product(recipe.wgrad, prepared.wgrad, g.device());
    const Wanted row{kDgradG, r.needs.dx, dgrad.reads_values()};
    const Wanted col{kWgradG, r.needs.dw[i], wgrad.reads_values()};
    LayerGradients out;
    const auto [rowwise, columnwise] = quantize_both(prepared, g, row, col, layers.state_of(i));
    if (row.is_wanted)
      out.x = scaled_mm(dgrad, product_input(prepared, rowwise, row), w, n, std::nullopt,
                        g.scalar_type());
    if (col.is_wanted) {
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

void check_dense(const char* name, const Tensor& t) {
  bridge::check_value_dtype("linear", name, t);
  TORCH_CHECK_VALUE(t.layout() == at::kStrided && !t.is_nested(), "linear: expected ", name,
                    " as a dense tensor, got ", t.layout());
}

void check_layer(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  check_dense("weight", weight);
  TORCH_CHECK_VALUE(weight.dim() == 2 && weight.sym_size(1) == x.sym_size(-1),
                    "linear: expected weight (N, ", x.sym_size(-1), ") for x ", x.sym_sizes(),
                    ", got ", weight.sym_sizes());
  TORCH_CHECK_VALUE(weight.device() == x.device(), "linear: expected weight on ", x.device(),
                    ", got ", weight.device());
  if (!bias) return;
  check_dense("bias", *bias);
  TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0),
                    "linear: expected bias (", weight.sym_size(0), "), got ", bias->sym_sizes());
  TORCH_CHECK_VALUE(bias->device() == x.device(), "linear: expected bias on ", x.device(), ", got ",
                    bias->device());
  bridge::check_memory_if_real("linear", "bias", *bias);
}

void check_layers(const Tensor& x, const Layers& layers, const PreparedRecipe& recipe) {
  check_dense("x", x);
  TORCH_CHECK_VALUE(x.dim() >= 1, "linear: expected x of shape (…, K), got a scalar");
  const std::size_t n = layers.weights.size(), states = layers.rng.size(),
                    histories = layers.histories.size();
  TORCH_CHECK_VALUE(n > 0, "linear: expected at least one weight");
  TORCH_CHECK_VALUE(layers.bias_index.size() == n, "linear_group: expected ", n, " biases, got ",
                    layers.bias_index.size());
  TORCH_CHECK_VALUE(!recipe.is_stochastic || states > 0, "linear: recipe ", recipe.text,
                    " rounds stochastically and needs rng, one int64 tensor a layer");
  TORCH_CHECK_VALUE(!recipe.is_delayed || histories > 0, "linear: recipe ", recipe.text,
                    " scales by history and needs amax_history, one tensor a layer");
  TORCH_CHECK_VALUE(states == 0 || states == n, "linear: expected rng of ", n, " layers, got ",
                    states);
  TORCH_CHECK_VALUE(histories == 0 || histories == n, "linear: expected amax_history of ", n,
                    " layers, got ", histories);
  for (std::size_t i = 0; i < n; ++i) check_layer(x, layers.weights[i], layers.bias_of(i));
  for (const Tensor& rng : layers.rng) {
    bridge::check_rng("linear", rng, x);
    bridge::check_memory_if_real("linear", "rng", rng);
  }
  for (const Tensor& history : layers.histories) check_history("linear", history, x);
}

std::vector<Tensor> apply(const Tensor& x, const Layers& layers, const std::string& recipe) {
  const PreparedRecipe& prepared = prepare(recipe);
  check_layers(x, layers, prepared);
  check_no_tangent("linear", "x", x);
  for (const Tensor& w : layers.weights) check_no_tangent("linear", "weight", w);
  for (const Tensor& b : layers.biases) check_no_tangent("linear", "bias", b);
  const Needs needs(x, layers);
  bool any = needs.dx || needs.any_dw;
  for (const bool db : needs.db) any = any || db;
  if (!any) return forward_pass(x, layers, prepared, needs, nullptr);
  return LinearFunction::apply(x, layers.weights, layers.biases, layers.bias_index, prepared,
                               layers.rng, layers.histories, layers.stream, layers.given, needs);
}

Tensor linear_kernel(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                     const std::string& recipe, const std::optional<Tensor>& rng,
                     const std::optional<Tensor>& amax_history, std::int64_t stream,
                     const std::optional<at::TensorList>& x_operands,
                     const std::optional<at::TensorList>& weight_operands) {
  const auto list = [](const std::optional<Tensor>& t) {
    return t ? at::TensorList(*t) : at::TensorList();
  };
  const Layers layers{
      .weights = weight,
      .biases = list(bias),
      .bias_index = {bias ? 0 : -1},
      .rng = list(rng),
      .histories = list(amax_history),
      .stream = stream,
      .given = {x_operands.value_or(at::TensorList()), weight_operands.value_or(at::TensorList())}};
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
                      .given = {}};
  return apply(x, layers, recipe);
}

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, CompositeImplicitAutograd, m) {
  m.impl("linear", linear_kernel);
  m.impl("linear_group", linear_group_kernel);
}

}  // namespace minifloat
