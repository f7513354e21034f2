#include "layers/arguments.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "ops/bridge.h"

namespace minifloat::torch_ops {
namespace {

void check_dense(const char* name, const Tensor& t) {
  bridge::check_value_dtype("linear", name, t);
  TORCH_CHECK_VALUE(!t.is_nested(), "linear: expected ", name,
                    " as a dense tensor, got a nested tensor");
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, "linear: expected ", name,
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

}  // namespace

NeededGradients::NeededGradients(const Tensor& x, const Layers& layers)
    : NeededGradients(x.requires_grad(), layers) {}

NeededGradients::NeededGradients(bool needs_dx, const Layers& layers) {
  const bool on = at::GradMode::is_enabled();
  dx = on && needs_dx;
  for (const Tensor& w : layers.weights) dw.push_back(on && w.requires_grad());
  for (const Tensor& b : layers.biases) db.push_back(on && b.requires_grad());
  for (const bool needed : dw) any_dw = any_dw || needed;
}

bool NeededGradients::any() const {
  bool any_db = false;
  for (const bool needed : db) any_db = any_db || needed;
  return dx || any_dw || any_db;
}

bool recomputes_weights(const char* op, const std::string& recompute) {
  TORCH_CHECK_VALUE(recompute.empty() || recompute == "weight", op,
                    ": expected recompute as '' or 'weight', got '", printable(recompute), "'");
  return !recompute.empty();
}

at::ScalarType autocast_dtype(c10::DeviceType device) {
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  TORCH_CHECK_VALUE(bridge::is_value_dtype(dtype), "torch.autocast: expected torch.bfloat16 or ",
                    "torch.float32 around layers under a recipe, got torch.",
                    c10::getDtypeNames(dtype).first, "; write torch.autocast(\"",
                    c10::DeviceTypeName(device, true), "\", torch.bfloat16)");
  return dtype;
}

namespace {
thread_local bool is_below_autocast = false;
}

BelowAutocast::BelowAutocast() : before_(std::exchange(is_below_autocast, true)) {}
BelowAutocast::~BelowAutocast() { is_below_autocast = before_; }

bool is_autocast(const Tensor& t) {
  return is_below_autocast ||
         (!t.is_meta() && at::autocast::is_autocast_enabled(t.device().type()));
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
  const std::size_t codes = layers.prequantized.weight.size();
  TORCH_CHECK_VALUE(codes == 0 || codes == 8 * n,
                    "linear: expected weight_operands as the eight "
                    "tensors of layer_operands for each weight, got ",
                    codes, " for ", n);
  for (std::size_t i = 0; i < n; ++i) check_layer(x, layers.weights[i], layers.bias_of(i));
  for (std::size_t i = 0; i < layers.sums.main_grads.size(); ++i)
    if (layers.weights[i].requires_grad())
      check_main_grad("linear", layers.sums.main_grads[i], layers.weights[i]);
  for (const Tensor& rng : layers.rng) {
    bridge::check_rng("linear", rng, x);
    bridge::check_memory_if_real("linear", "rng", rng);
  }
  for (const Tensor& history : layers.histories) check_history("linear", history, x);
  if (!layers.shards.sharding) return;
  const Sharding& sharding = *layers.shards.sharding;
  check_sharding("linear", sharding, x);
  check_shards("linear", recipe, sharding, layers.weights[0].sym_size(sharding.weight_dim));
  check_tokens(recipe, sharding, x);
}

}  // namespace minifloat::torch_ops
