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
#include <torch/library.h>

#include <mutex>
#include <unordered_map>

#include "bridge.h"
#include "minifloat/core/philox.h"
#include "ops.h"

namespace minifloat {
namespace {

using at::Tensor;
using c10::SymInt;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch_ops::QuantizedOperand;

constexpr std::int64_t stream_of(std::string_view operand_and_product) {
  return static_cast<std::int64_t>(fnv1a64(operand_and_product.data(), operand_and_product.size()));
}

// An operand's place in a recipe: its row of the amax history, and its random stream within the module.
enum Place { kFpropX, kFpropW, kDgradG, kDgradW, kWgradG, kWgradX, kPlaces };
constexpr std::int64_t kStreams[kPlaces] = {stream_of("x/fprop"), stream_of("w/fprop"),
                                            stream_of("g/dgrad"), stream_of("w/dgrad"),
                                            stream_of("g/wgrad"), stream_of("x/wgrad")};

// Columns of an amax history (kPlaces, 1 + length): the amax in force, then the newest first.
enum HistoryColumn { kInForce, kRunning };

// A recipe and the texts that its ops take, parsed once a process.
struct PreparedRecipe {
  Recipe recipe;
  std::string fprop, dgrad, wgrad;
};

const PreparedRecipe& prepare(const std::string& text) {
  static std::mutex mutex;
  static std::unordered_map<std::string, PreparedRecipe> prepared;
  const std::lock_guard lock(mutex);
  if (const auto found = prepared.find(text); found != prepared.end()) return found->second;
  const Recipe r = bridge::with_value_errors([&] { return Recipe::parse(text); });
  return prepared.emplace(text, PreparedRecipe{r, r.fprop.str(), r.dgrad.str(), r.wgrad.str()})
      .first->second;
}

// One operand of one product, as a layer asks for it.
struct Wanted {
  const Spec* spec = nullptr;  // null: not wanted
  Place place = kFpropX;
  bool decoded = false;  // also as the values that an exact product reads, where it follows at once
};

// The CPU multiplies exactly, always.
bool multiplies_exactly(const Tensor& x) { return x.device().is_cpu(); }

Tensor history_cell(const Tensor& history, Place place, HistoryColumn column) {
  return history.select(0, place).select(0, column);
}

// Both directions of x (rows, cols) from one read; bf16 directions are x itself and its transposed view.
std::pair<QuantizedOperand, QuantizedOperand> quantize_both(const Tensor& x, const Wanted& row,
                                                            const Wanted& col, const Tensor& rng,
                                                            const Tensor& history) {
  torch_ops::QuantizeOptions options;
  std::string texts[2];
  const auto ask = [&](const Wanted& wanted, std::string& text, std::optional<Tensor>& amax,
                       std::int64_t& stream, bool& decoded) {
    if (!wanted.spec || wanted.spec->is_bf16()) return;
    text = wanted.spec->str();
    if (wanted.spec->delayed) amax = history_cell(history, wanted.place, kInForce);
    if (wanted.spec->stochastic) options.rng = rng;
    stream = kStreams[wanted.place];
    decoded = wanted.decoded;
  };
  ask(row, texts[0], options.amax_row, options.stream_row, options.decoded_row);
  ask(col, texts[1], options.amax_col, options.stream_col, options.decoded_col);

  std::pair<QuantizedOperand, QuantizedOperand> out;
  if (!texts[0].empty() || !texts[1].empty())
    out = torch_ops::quantize(x, texts[0], texts[1], options);
  const auto finish = [&](const Wanted& wanted, QuantizedOperand& operand, const Tensor& values) {
    if (!wanted.spec) return;
    if (wanted.spec->is_bf16()) {
      const Tensor none = at::empty({0}, x.options().dtype(at::kFloat));
      operand = {values, none, none, values};
      return;
    }
    if (!wanted.spec->delayed) return;
    const Tensor running = history_cell(history, wanted.place, kRunning);
    running.copy_(at::maximum(running, operand.amax));
  };
  finish(row, out.first, x);
  finish(col, out.second, x.t());
  return out;
}

// What the product multiplies: the decoded values where they were asked for, else the codes.
QuantizedOperand payload(const QuantizedOperand& operand, const Wanted& wanted) {
  QuantizedOperand out = operand;
  if (wanted.decoded) out.codes = operand.decoded;
  return out;
}

Tensor as_matrix(const Tensor& x) { return x.reshape_symint({-1, x.sym_size(-1)}).contiguous(); }

// The arguments of the layers, as the autograd function takes them, which is with defined tensors only. rng and
// histories are empty, or one a weight.
struct Layers {
  at::TensorList weights;
  at::TensorList biases;        // those that there are
  std::vector<int> bias_index;  // of each weight's among them; -1: none
  at::TensorList rng, histories;

  std::optional<Tensor> bias_of(std::size_t i) const {
    return bias_index[i] < 0 ? std::nullopt : std::optional(biases[bias_index[i]]);
  }
  Tensor rng_of(std::size_t i) const { return rng.empty() ? Tensor() : rng[i]; }
  Tensor history_of(std::size_t i) const { return histories.empty() ? Tensor() : histories[i]; }
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
  const bool exact = multiplies_exactly(x);
  const Tensor matrix = as_matrix(x);
  const SymInt k = x.sym_size(-1);

  const Wanted x_row{&recipe.fprop.a, kFpropX, exact};
  const Wanted x_col{needs.any_dw ? &recipe.wgrad.b : nullptr, kWgradX, false};
  const auto [rowwise, columnwise] =
      quantize_both(matrix, x_row, x_col, layers.rng_of(0), layers.history_of(0));
  const auto save = [&](const QuantizedOperand& operand) {
    if (saved) saved->insert(saved->end(), {operand.codes, operand.scale, operand.amax});
  };
  save(columnwise);

  std::vector<Tensor> outputs;
  for (std::size_t i = 0; i < layers.weights.size(); ++i) {
    const Tensor weight = layers.weights[i].scalar_type() == x.scalar_type()
                              ? layers.weights[i]
                              : layers.weights[i].to(x.scalar_type());
    const Wanted w_row{&recipe.fprop.b, kFpropW, exact};
    const Wanted w_col{needs.dx ? &recipe.dgrad.b : nullptr, kDgradW, false};
    const auto [w_rowwise, w_columnwise] =
        quantize_both(weight, w_row, w_col, layers.rng_of(i), layers.history_of(i));
    save(w_columnwise);
    const Tensor y = torch_ops::scaled_mm(payload(rowwise, x_row), payload(w_rowwise, w_row),
                                          prepared.fprop, k, layers.bias_of(i), x.scalar_type());
    c10::SymDimVector shape(x.sym_sizes().begin(), x.sym_sizes().end());
    shape.back() = weight.sym_size(0);
    outputs.push_back(y.view_symint(shape));
  }
  return outputs;
}

// What backward must know besides tensors; lives in the context.
struct Remembered {
  std::string recipe;
  std::vector<SymInt> x_shape;
  std::vector<at::ScalarType> weight_dtypes, bias_dtypes;
  std::vector<int> bias_index;
  Needs needs;
  variable_list histories;  // written by backward, so not saved variables
};

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, at::TensorList weights,
                               at::TensorList biases, const std::vector<int>& bias_index,
                               const std::string& recipe, at::TensorList rng,
                               at::TensorList histories, const Needs& needs) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const Layers layers{weights, biases, bias_index, rng, histories};
    variable_list saved;
    variable_list outputs = forward_pass(x, layers, prepare(recipe), needs, &saved);
    saved.insert(saved.end(), rng.begin(), rng.end());
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["remembered"] = remember(x, layers, recipe, needs);
    return outputs;
  }

  // What `backward` reads back; a capsule, because the context stores plain values.
  struct Capsule : torch::CustomClassHolder {
    explicit Capsule(Remembered r) : value(std::move(r)) {}
    Remembered value;
  };
  static c10::IValue remember(const Tensor& x, const Layers& layers, const std::string& recipe,
                              const Needs& needs) {
    Remembered r{recipe, x.sym_sizes().vec(),   {}, {}, layers.bias_index,
                 needs,  layers.histories.vec()};
    for (const Tensor& w : layers.weights) r.weight_dtypes.push_back(w.scalar_type());
    for (const Tensor& b : layers.biases) r.bias_dtypes.push_back(b.scalar_type());
    return c10::IValue::make_capsule(c10::make_intrusive<Capsule>(std::move(r)));
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto capsule = ctx->saved_data["remembered"].toCapsule();
    const Remembered& r = static_cast<const Capsule*>(capsule.get())->value;
    // Unpacking may run a checkpointed forward pass again, which records its own graph.
    const variable_list saved = ctx->get_saved_variables();
    const at::AutoDispatchBelowADInplaceOrView below;
    const std::size_t n = grads.size();
    const auto operand = [&](std::size_t i) -> QuantizedOperand {
      return {saved[3 * i], saved[3 * i + 1], saved[3 * i + 2], Tensor()};
    };
    const Layers layers{
        {}, {}, r.bias_index, at::TensorList(saved).slice(3 * (n + 1)), r.histories};
    const std::size_t biases = r.bias_dtypes.size();

    // x, weights, biases, bias_index, recipe, rng, histories, needs
    variable_list out(1 + n + biases + 2 + layers.rng.size() + layers.histories.size() + 1);
    QuantizedOperand x = operand(0);
    for (std::size_t i = 0; i < n; ++i) {
      if (!grads[i].defined()) continue;
      const LayerGradients d = layer_backward(r, layers, i, grads[i], x, operand(i + 1), n > 1);
      if (d.x.defined()) out[0] = out[0].defined() ? out[0] + d.x : d.x;
      out[1 + i] = d.weight;
      if (d.bias.defined()) out[1 + n + r.bias_index[i]] = d.bias;
    }
    if (out[0].defined()) out[0] = out[0].view_symint(r.x_shape);
    return out;
  }

  struct LayerGradients {
    Tensor x, weight, bias;
  };

  // x: as wgrad reads it; decoded in place where the whole group is going to read it.
  static LayerGradients layer_backward(const Remembered& r, const Layers& layers, std::size_t i,
                                       const Tensor& grad, QuantizedOperand& x,
                                       const QuantizedOperand& w, bool shared) {
    const PreparedRecipe& prepared = prepare(r.recipe);
    const Recipe& recipe = prepared.recipe;
    const Tensor g = as_matrix(grad);
    const SymInt m = g.sym_size(0), n = g.sym_size(1);
    const bool exact = multiplies_exactly(g);
    const Wanted row{r.needs.dx ? &recipe.dgrad.a : nullptr, kDgradG, exact};
    const Wanted col{r.needs.dw[i] ? &recipe.wgrad.a : nullptr, kWgradG, exact};
    LayerGradients out;
    const auto [rowwise, columnwise] =
        quantize_both(g, row, col, layers.rng_of(i), layers.history_of(i));
    if (row.spec)
      out.x = torch_ops::scaled_mm(payload(rowwise, row), w, prepared.dgrad, n, std::nullopt,
                                   g.scalar_type());
    if (col.spec) {
      if (shared && exact && x.codes.scalar_type() == at::kByte)
        x.codes = torch_ops::decode(x.codes, x.scale, recipe.wgrad.b.str(), m);
      out.weight = torch_ops::scaled_mm(payload(columnwise, col), x, prepared.wgrad, m,
                                        std::nullopt, r.weight_dtypes[i]);
    }
    const int bias = r.bias_index[i];
    if (bias >= 0 && r.needs.db[bias])
      out.bias = g.sum(0, false, at::kFloat).to(r.bias_dtypes[bias]);
    return out;
  }
};

void check_layers(const Tensor& x, const Layers& layers, const Recipe& recipe) {
  TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
                    "linear: expected x in float32 or bfloat16, got ", x.scalar_type());
  TORCH_CHECK_VALUE(x.dim() >= 1, "linear: expected x of shape (…, K), got a scalar");
  const std::size_t n = layers.weights.size();
  TORCH_CHECK_VALUE(n > 0, "linear: expected at least one weight");
  TORCH_CHECK_VALUE(layers.bias_index.size() == n, "linear_group: expected ", n, " biases, got ",
                    layers.bias_index.size());
  for (std::size_t i = 0; i < n; ++i) {
    const Tensor& w = layers.weights[i];
    TORCH_CHECK_VALUE(w.dim() == 2 && w.sym_size(1) == x.sym_size(-1),
                      "linear: expected weight (N, ", x.sym_size(-1), ") for x ", x.sym_sizes(),
                      ", got ", w.sym_sizes());
    TORCH_CHECK_VALUE(w.device() == x.device(), "linear: expected weight on ", x.device(), ", got ",
                      w.device());
    const std::optional<Tensor> b = layers.bias_of(i);
    TORCH_CHECK_VALUE(!b || (b->dim() == 1 && b->sym_size(0) == w.sym_size(0)),
                      "linear: expected bias (", w.sym_size(0), "), got ", b->sym_sizes());
  }
  TORCH_CHECK_VALUE(!recipe.is_stochastic() || layers.rng.size() == n, "linear: recipe ",
                    recipe.str(), " rounds stochastically and needs rng, one int64 tensor a layer");
  TORCH_CHECK_VALUE(!recipe.is_delayed() || layers.histories.size() == n, "linear: recipe ",
                    recipe.str(), " scales by history and needs amax_history, one tensor a layer");
  for (const Tensor& history : layers.histories)
    TORCH_CHECK_VALUE(history.dim() == 2 && history.sym_size(0) == kPlaces &&
                          history.sym_size(1) >= 2 && history.scalar_type() == at::kFloat,
                      "linear: expected amax_history as float32 (", static_cast<int>(kPlaces),
                      ", 1 + length), got ", history.scalar_type(), " ", history.sym_sizes());
}

std::vector<Tensor> apply(const Tensor& x, const Layers& layers, const std::string& recipe) {
  const PreparedRecipe& prepared = prepare(recipe);
  check_layers(x, layers, prepared.recipe);
  const Needs needs(x, layers);
  bool any = needs.dx || needs.any_dw;
  for (const bool db : needs.db) any = any || db;
  if (!any) return forward_pass(x, layers, prepared, needs, nullptr);
  return LinearFunction::apply(x, layers.weights, layers.biases, layers.bias_index,
                               prepared.recipe.str(), layers.rng, layers.histories, needs);
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
              const std::string& recipe, const std::optional<Tensor>& rng,
              const std::optional<Tensor>& amax_history) {
  const auto list = [](const std::optional<Tensor>& t) {
    return t ? at::TensorList(*t) : at::TensorList();
  };
  const Layers layers{weight, list(bias), {bias ? 0 : -1}, list(rng), list(amax_history)};
  return apply(x, layers, recipe).front();
}

std::vector<Tensor> linear_group(const Tensor& x, at::TensorList weights,
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
  const Layers layers{weights, present, index, rng.value_or(at::TensorList()),
                      amax_history.value_or(at::TensorList())};
  return apply(x, layers, recipe);
}

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, CompositeImplicitAutograd, m) {
  m.impl("linear", linear);
  m.impl("linear_group", linear_group);
}

}  // namespace minifloat
