#include "layers/passes.h"

#include <ATen/ATen.h>

#include "ops/bridge.h"
#include "ops/direct.h"

namespace minifloat::torch_ops {
namespace {

// Returns both directions of weight i, or, where backward quantizes it again, the rowwise one and
// the amax of the other.
Directions weight_operands_of(const ForwardPass& pass, std::size_t i, const Needed& row,
                              const Needed& col, bool casts_later) {
  const Layers& layers = pass.layers;
  const PreparedRecipe& prepared = pass.prepared;
  const Recipe& recipe = prepared.recipe;
  const at::TensorList given = layers.operands_of_weight(i);
  const bool has_codes = !given.empty();
  const bool reads_weight =
      !has_codes || recipe.fprop.b.is_bf16() || (col.is_needed && recipe.dgrad.b.is_bf16());
  if (reads_weight) bridge::check_memory_if_real("linear", "weight", layers.weights[i]);
  const Tensor weight = reads_weight ? to_dtype(layers.weights[i], pass.dtype) : layers.weights[i];
  if (has_codes) {
    const Directions out = prequantized_both(prepared, "linear", "weight_operands", given, weight,
                                             weight.sym_size(0), row, col);
    record_amaxes(prepared, row, col, pass.state_of(i), out, false);
    return out;
  }
  return casts_later ? quantize_rowwise_first(prepared, weight, row, col, pass.state_of(i))
                     : quantize_both(prepared, weight, row, col, pass.state_of(i));
}

// Returns x (…, K) as (M, K), without a copy of values that are not read.
Tensor rows_of(const Tensor& x) {
  SymInt rows = 1;
  for (std::int64_t i = 0; i + 1 < x.dim(); ++i) rows = rows * x.sym_size(i);
  return x.reshape_symint({rows, x.sym_size(-1)});
}

}  // namespace

ModuleState ForwardPass::state_of(std::size_t i) const {
  ModuleState state = layers.state_of(i);
  state.pending = &amaxes;
  return state;
}

void ForwardPass::save(const QuantizedOperand& operand, Place place) const {
  const Spec& spec = prepared.specs[place];
  const bool has_amax = spec.has_tensor_amax() || spec.has_row_amax();
  if (saved)
    saved->insert(saved->end(), {operand.codes, operand.scale, has_amax ? operand.amax : Tensor()});
}

Directions input_operands(const ForwardPass& pass, const char* op, const Tensor& x,
                          const Needed& row, const Needed& col) {
  const Layers& layers = pass.layers;
  const Sharding* sharding = layers.shards.sharding;
  const bool is_cut = sharding && sharding->token_dim;
  const at::TensorList given = layers.prequantized.x;
  const auto is_read = [&](const Needed& w) {
    return w.is_needed && (given.empty() || pass.prepared.specs[w.place].is_bf16());
  };
  const Tensor matrix = is_read(row) || is_read(col) ? as_matrix(op, "x", x) : rows_of(x);
  share_version(matrix, x);
  if (!given.empty())
    return prequantized_both(pass.prepared, op, "x_operands", given, matrix,
                             matrix.sym_size(0) * (is_cut ? sharding->ranks : 1), row, col);
  ModuleState state = pass.state_of(0);
  state.returns_amaxes = layers.weights.size() > 1;  // for the histories of the other weights
  Directions out = quantize_both(pass.prepared, matrix, row, col, state);
  // x is scaled by the first weight's history, which those of other readers of x equal.
  for (std::size_t i = 1; i < layers.weights.size(); ++i)
    record_amaxes(pass.prepared, row, col, pass.state_of(i), out, false);
  if (is_cut)
    out.first = gather_tokens(*sharding, token_runs(*sharding, x.sym_sizes()), out.first, false);
  return out;
}

ProductInput forward_input(const ForwardPass& pass, const QuantizedOperand& x, const Needed& row,
                           bool is_prequantized) {
  ProductInput input = is_prequantized ? prequantized_input(pass.prepared, x, row)
                                       : product_input(pass.prepared, x, row);
  if (pass.layers.weights.size() == 1) return input;
  return prepare_input(pass.fprop(), pass.prepared.recipe.fprop.a, std::move(input), pass.k);
}

std::vector<Tensor> multiply_weights(const ForwardPass& pass, const ProductInput& x) {
  const Layers& layers = pass.layers;
  const Sharding* sharding = layers.shards.sharding;
  const PlannedProduct fprop = pass.fprop();
  std::vector<Tensor> outputs;
  for (std::size_t i = 0; i < layers.weights.size(); ++i) {
    const bool has_codes = !layers.operands_of_weight(i).empty();
    const bool casts_later = pass.needs.dx && layers.recomputes_weights && !has_codes &&
                             !pass.prepared.recipe.dgrad.b.is_bf16();
    const Needed row{kFpropW, true, !sharding && fprop.reads_values() && !has_codes},
        col{kDgradW, pass.needs.dx};
    const Directions w = weight_operands_of(pass, i, row, col, casts_later);
    if (casts_later)
      pass.save({layers.weights[i], Tensor(), w.second.amax, Tensor()}, kDgradW);
    else
      pass.save(w.second, kDgradW);
    // On one rank, where y is a sum over the ranks.
    const bool adds_bias = !sharding || sharding->weight_dim == 0 || sharding->rank == 0;
    const ProductInput right = has_codes ? prequantized_input(pass.prepared, w.first, row)
                                         : product_input(pass.prepared, w.first, row);
    outputs.push_back(scaled_mm(fprop, x, right, pass.k,
                                adds_bias ? layers.bias_of(i) : std::nullopt, pass.dtype));
  }
  return outputs;
}

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

SavedLayers::SavedLayers(const Layers& layers, const PreparedRecipe& of_recipe,
                         at::ScalarType dtype)
    : recipe(of_recipe),
      streams(layers.streams),
      x_dtype(dtype),
      accumulation(layers.sums.accumulation),
      main_grads(layers.sums.main_grads.vec()),
      bias_index(layers.bias_index),
      histories(layers.histories.vec()),
      rng(layers.rng.vec()) {
  for (const Tensor& w : layers.weights) {
    weight_dtypes.push_back(w.scalar_type());
    const bool is_cast =
        layers.prequantized.weight.empty() || w.key_set().has(c10::DispatchKey::Python);
    product_dtypes.push_back(is_cast ? w.scalar_type() : dtype);
  }
  for (std::size_t i = 0; i < layers.weights.size(); ++i) features.push_back(layers.features_of(i));
  for (const Tensor& b : layers.biases) bias_dtypes.push_back(b.scalar_type());
}

ModuleState SavedLayers::state_of(std::size_t i, const Sharding* sharding) const {
  return {.rng = rng.empty() ? Tensor() : rng[i],
          .stream = streams.empty() ? 0 : streams[i],
          .history = histories.empty() ? Tensor() : histories[i],
          .pending = nullptr,
          .sharding = sharding,
          .features = features[i]};
}

ProductInput saved_input(const SavedLayers& layers, const std::vector<Tensor>& saved, std::size_t i,
                         Place place) {
  return cast_input(layers.recipe.specs[place], saved[i], saved[i + 1], saved[i + 2]);
}

ProductInput saved_weight(const SavedLayers& layers, const std::vector<Tensor>& saved,
                          std::size_t i, const Sharding* sharding) {
  // A weight that is saved itself is a matrix of values; codes are bytes.
  const Tensor& first = saved[3 * (i + 1)];
  const bool is_values = first.defined() && first.is_floating_point();
  if (!is_values || layers.recipe.recipe.dgrad.b.is_bf16())
    return saved_input(layers, saved, 3 * (i + 1), kDgradW);
  const PlannedProduct dgrad =
      plan_product(layers.recipe.recipe.dgrad, layers.recipe.dgrad, first.device());
  const Needed col{kDgradW, true, !sharding && dgrad.reads_values()};
  const QuantizedOperand w =
      quantize_columnwise_later(layers.recipe, to_dtype(first, layers.x_dtype), col,
                                saved[3 * (i + 1) + 2], layers.state_of(i, sharding));
  return product_input(layers.recipe, w, col);
}

Tensor input_gradient(const SavedLayers& layers, const QuantizedOperand& g, const Needed& row,
                      const ProductInput& weight, const SymInt& n, at::ScalarType dtype,
                      const at::Device& device) {
  const PreparedRecipe& prepared = layers.recipe;
  const PlannedProduct dgrad = plan_product(prepared.recipe.dgrad, prepared.dgrad, device);
  return scaled_mm(dgrad, product_input(prepared, g, row), weight, n, std::nullopt, dtype);
}

Tensor weight_gradient(const SavedLayers& layers, std::size_t i, const QuantizedOperand& g,
                       const Needed& col, const ProductInput& x, const SymInt& m,
                       const at::Device& device, std::size_t edge) {
  const PreparedRecipe& prepared = layers.recipe;
  const PlannedProduct wgrad = plan_product(prepared.recipe.wgrad, prepared.wgrad, device);
  const ProductInput of_g = product_input(prepared, g, col);
  const Tensor main_grad = layers.main_grads.empty() ? Tensor() : layers.main_grads[i];
  if (const WeightSum sum = sum_of_weight(layers.accumulation, main_grad, edge);
      sum.tensor.defined()) {
    add_scaled_mm(wgrad, of_g, x, m, sum.tensor);
    return received_for(layers.accumulation, sum.tensor, layers.weight_dtypes[i]);
  }
  if (layers.accumulation.is_on()) {
    // Backward within autocast's context would round the product on the CPU.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return scaled_mm(wgrad, of_g, x, m, std::nullopt, at::kFloat);
  }
  return to_dtype(scaled_mm(wgrad, of_g, x, m, std::nullopt, layers.product_dtypes[i]),
                  layers.weight_dtypes[i]);
}

Tensor bias_gradient(const SavedLayers& layers, int bias, const Tensor& g) {
  return to_dtype(g.sum(0, false, at::kFloat), layers.bias_dtypes[static_cast<std::size_t>(bias)]);
}

}  // namespace minifloat::torch_ops
