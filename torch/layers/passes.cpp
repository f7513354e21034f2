#include "layers/passes.h"

#include <ATen/ATen.h>

#include "layers/expert_weights.h"
#include "layers/layer_ops.h"
#include "layers/recorded_args.h"
#include "ops/bridge.h"
#include "ops/direct.h"

namespace minifloat::torch_ops {
namespace {

// Returns the state of weight i. layers: Layers or SavedLayers
template <class LayersOfCall>
CastContext state_of_weight(const LayersOfCall& layers, std::size_t i, const Sharding* sharding,
                            const std::array<SymInt, 2>& features) {
  CastContext state;
  if (!layers.rng.empty()) state.rng = layers.rng[i];
  if (!layers.streams.empty()) state.stream = layers.streams[i];
  if (!layers.histories.empty()) state.history = layers.histories[i];
  state.sharding = sharding;
  if (layers.groups)
    state.first_expert = layers.groups->first_expert;
  else
    state.features = features;
  return state;
}

// Returns the same state for x or g, whose rows may lie in groups.
CastContext in_groups(CastContext state, const std::optional<RowGroups>& groups,
                      const PreparedRecipe& recipe) {
  if (groups) {
    state.groups = {groups->table, wgrad_unit(recipe)};
    state.row_ids = groups->row_ids;
  }
  return state;
}

// Returns the groups of products whose rows lie in groups.
Groups groups_of(const std::optional<RowGroups>& groups, std::int64_t unit) {
  return groups ? Groups{groups->table, unit} : Groups{};
}

// Returns W as casts read it, from a weight in the dtype of x.
Tensor matrices_of(const Tensor& weight, bool is_experts) {
  return is_experts ? transposed_matrices(weight) : weight;
}

Directions quantize_weight(const PreparedRecipe& recipe, const Tensor& w, const OperandUse& row,
                           const OperandUse& col, const CastContext& state) {
  if (w.dim() == 3) return quantize_expert_weights(recipe, w, row, col, state);
  const Tensor matrix = has_adjacent_columns(w) ? w : as_matrix("linear", "weight", w);
  return quantize_both(recipe, matrix, row, col, state);
}

// Returns x (…, K) as (M, K), without a copy of values that are not read.
Tensor rows_of(const Tensor& x) {
  if (x.dim() == 2) return x;
  SymInt rows = 1;
  for (std::int64_t i = 0; i + 1 < x.dim(); ++i) rows = rows * x.sym_size(i);
  return x.reshape_symint({rows, x.sym_size(-1)});
}

// Returns the amax that backward's cast of W takes, where forward reads the caller's codes of it.
Tensor kept_amax_of_codes(const ForwardPass& pass, at::TensorList codes, const Tensor& w) {
  const PreparedRecipe& recipe = pass.prepared;
  const Tensor &row = codes[2], &col = codes[6];
  const bool is_of_rows = finds_amaxes_of_columns(recipe.specs[kFpropW], recipe.specs[kDgradW]) &&
                          has_adjacent_columns(w) && !pass.layers.shards.sharding &&
                          col.numel() > 0;
  const Tensor& amax = is_of_rows ? col : row;
  if (amax.numel() == 0) return {};
  bridge::check_memory_if_real(pass.layers.op(), "weight_operands", amax);
  return is_of_rows ? amax.clone() : amax_of_both(recipe, kFpropW, kDgradW, amax);
}

// Returns x as fprop reads it, from a direction of x: in the form that all weights' products share.
ProductInput forward_input(const ForwardPass& pass, const QuantizedOperand& x,
                           const OperandUse& row) {
  ProductInput input = product_input(pass.prepared, x, row);
  if (pass.layers.weights.size() == 1) return input;
  return prepare_input(pass.fprop(), pass.prepared.recipe.fprop.a, std::move(input), pass.k);
}

// Returns whether an exact product's cast writes values. Ranks that cut a dense layer read codes.
// Where backward reads the codes of forward, its cast writes those.
bool decodes(const PlannedProduct& product, const Sharding* sharding, bool has_groups) {
  return product.reads_values() && (!sharding || has_groups);
}

// Returns the rowwise direction of x.
OperandUse row_of_x(const ForwardPass& pass) {
  const Layers& layers = pass.layers;
  const at::TensorList given = layers.prequantized.x;
  // An exact product of experts decodes codes that come without their values.
  const bool has_values = !layers.groups || given.size() < 4 || given[3].dim() > 1;
  return {.place = kFpropX,
          .decoded = !pass.prepared.keeps_codes(kFpropX) &&
                     decodes(pass.fprop(), layers.shards.sharding, layers.groups.has_value()) &&
                     has_values,
          .given = !given.empty()};
}

OperandUse row_of_weight(const ForwardPass& pass, std::size_t i) {
  const Layers& layers = pass.layers;
  const bool given = !layers.operands_of_weight(i).empty();
  return {.place = kFpropW,
          .decoded = !given && !pass.prepared.keeps_codes(kFpropW) &&
                     decodes(pass.fprop(), layers.shards.sharding, layers.groups.has_value()),
          .given = given};
}

// Returns whether backward quantizes weight i again.
bool casts_weight_later(const ForwardPass& pass, std::size_t i) {
  return pass.saved && pass.needs.dx && pass.layers.recomputes_weights &&
         pass.layers.operands_of_weight(i).empty() && !pass.prepared.reads_values(kDgradW);
}

Directions operands_of_forward(const ForwardPass& pass, std::size_t i) {
  return weight_operands(pass, i, row_of_weight(pass, i), {kDgradW, pass.needs.dx},
                         casts_weight_later(pass, i));
}

// Saves the weights and returns y of each, for an op on Meta, where engines are not those of a
// device.
std::vector<Tensor> shapes_of_products(const ForwardPass& pass, const QuantizedOperand& x) {
  std::vector<Tensor> outputs;
  for (std::size_t i = 0; i < pass.layers.weights.size(); ++i) {
    const OperandUse col{kDgradW, pass.needs.dx};
    pass.save(weight_operands(pass, i, {kFpropW}, col, casts_weight_later(pass, i)).second,
              kDgradW);
    const SymInt shape[] = {x.codes.sym_size(0), pass.layers.features_of(i)[0]};
    outputs.push_back(empty_result(x.codes, shape, pass.out_dtype));
  }
  return outputs;
}

}  // namespace

Tensor amax_of_codes(const Spec& spec, const QuantizedOperand& operand) {
  const bool has_amax = (spec.has_tensor_amax() && !spec.delayed) || spec.has_row_amax();
  return has_amax ? operand.amax : Tensor();
}

CastContext ForwardPass::state_of(std::size_t i) const {
  CastContext state = state_of_weight(layers, i, layers.shards.sharding, layers.features_of(i));
  state.deferred_amaxes = deferred_amaxes;
  state.apart_col = returns_saved;
  state.swizzled_apart = returns_swizzled;
  return state;
}

CastContext ForwardPass::state_of_rows(std::size_t i) const {
  return in_groups(state_of(i), layers.groups, prepared);
}

void ForwardPass::save(const QuantizedOperand& operand, Place place) const {
  if (saved)
    saved->insert(saved->end(), {operand.codes, operand.scale,
                                 amax_of_codes(prepared.spec_of_codes(place), operand)});
}

Directions input_operands(const ForwardPass& pass, const char* op, const Tensor& x,
                          const OperandUse& row, const OperandUse& col) {
  const Layers& layers = pass.layers;
  const Sharding* sharding = layers.shards.sharding;
  const bool is_cut = sharding && sharding->token_dim;
  const at::TensorList given = layers.prequantized.x;
  const auto is_read = [&](const OperandUse& w) {
    return w.is_needed && (given.empty() || pass.prepared.reads_values(w.place));
  };
  const Tensor matrix =
      is_read(row) || is_read(col) ? as_matrix(op, layers.groups ? "A" : "x", x) : rows_of(x);
  share_version(matrix, x);
  if (!given.empty())
    return prequantized_both(pass.prepared, op, layers.groups ? "a_operands" : "x_operands", given,
                             matrix, matrix.sym_size(0) * (is_cut ? sharding->ranks : 1), row, col,
                             layers.groups ? layers.groups->table.sym_size(1) - 1 : SymInt(1));
  CastContext state = pass.state_of_rows(0);
  // x is scaled by the first weight's history, which those of other readers of x equal.
  if (!layers.histories.empty()) state.other_histories = layers.histories.slice(1);
  Directions out = quantize_both(pass.prepared, matrix, row, col, state);
  if (is_cut)
    out.first =
        TokenGather(*sharding, token_runs(*sharding, x.sym_sizes()), out.first, false).finish();
  return out;
}

Directions weight_operands(const ForwardPass& pass, std::size_t i, const OperandUse& row,
                           const OperandUse& col, bool casts_later, const Tensor& amax) {
  const Layers& layers = pass.layers;
  const bool is_experts = layers.groups.has_value();
  const at::TensorList given = layers.operands_of_weight(i);
  const auto reads_values = [&](const OperandUse& w) {
    return w.is_needed && (given.empty() || pass.prepared.reads_values(w.place));
  };
  const bool is_read = reads_values(row) || reads_values(col);
  if (is_read)
    bridge::check_memory_if_real(layers.op(), is_experts ? "B" : "weight", layers.weights[i]);
  const Tensor w = matrices_of(
      is_read ? to_dtype(layers.weights[i], pass.dtype) : layers.weights[i], is_experts);
  CastContext state = pass.state_of(i);
  Directions out;
  if (!given.empty()) {
    out = prequantized_both(pass.prepared, layers.op(), "weight_operands", given, w, w.sym_size(-2),
                            row, col, is_experts ? w.sym_size(0) : SymInt(1));
    // Amaxes of a dense layer's codes are those of all ranks already.
    raise_histories(pass.prepared, row, col, state, out, is_experts && state.sharding);
  } else {
    if (amax.defined()) state.amax = amax;
    state.casts_other_later = casts_later || pass.keeps_amax;
    out = quantize_weight(pass.prepared, w, row, {col.place, col.is_needed && !casts_later}, state);
  }
  // Also of codes: a checkpoint's second forward may read some where the first cast W.
  if (pass.keeps_amax)
    *pass.keeps_amax = given.empty() ? out.second.amax : kept_amax_of_codes(pass, given, w);
  return out;
}

std::vector<Tensor> multiply_by_weights(const ForwardPass& pass, const char* op, const Tensor& x) {
  // What a caller gave is checked before a cast raises a history, and a weight before x is cast.
  std::optional<Directions> first;
  if (pass.layers.prequantized.x.empty() && !records_forward(pass.prepared, pass.layers, x)) {
    bridge::check_memory_if_real(op, pass.layers.groups ? "A" : "x", x);
    first = operands_of_forward(pass, 0);
  }
  const auto [rowwise, row] = cast_input(pass, op, x);
  return multiply_operand(pass, rowwise, row, std::move(first));
}

std::pair<QuantizedOperand, OperandUse> cast_input(const ForwardPass& pass, const char* op,
                                                   const Tensor& x) {
  const OperandUse row = row_of_x(pass);
  auto [rowwise, columnwise] = input_operands(pass, op, x, row, {kWgradX, pass.needs.any_dw});
  pass.save(columnwise, kWgradX);
  return {std::move(rowwise), row};
}

std::vector<Tensor> multiply_operand(const ForwardPass& pass, const QuantizedOperand& x,
                                     const OperandUse& row, std::optional<Directions> first) {
  const Layers& layers = pass.layers;
  const Sharding* sharding = layers.shards.sharding;
  if (pass.returns_saved && layers.weights[0].is_meta()) return shapes_of_products(pass, x);
  if (records_forward(pass.prepared, layers, x.codes)) return record_forward(pass, x);
  const PlannedProduct fprop = pass.fprop();
  const ProductInput left = forward_input(pass, x, row);
  // On one rank, where y is a sum over the ranks.
  const bool adds_bias =
      !sharding || layers.groups || sharding->weight_dim == 0 || sharding->rank == 0;
  std::vector<Tensor> outputs;
  for (std::size_t i = 0; i < layers.weights.size(); ++i) {
    const Directions w = first ? *std::exchange(first, std::nullopt) : operands_of_forward(pass, i);
    if (casts_weight_later(pass, i))
      pass.save({layers.weights[i], Tensor(), w.second.amax, Tensor()}, kDgradW);
    else
      pass.save(w.second, kDgradW);
    outputs.push_back(
        scaled_mm(fprop, left, product_input(pass.prepared, w.first, row_of_weight(pass, i)),
                  pass.k, adds_bias ? layers.bias_of(i) : std::nullopt, pass.out_dtype,
                  groups_of(layers.groups, 0), layers.groups && layers.groups->zeroes_tail));
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
      main_grads(layers.sums.main_grads),
      bias_index(layers.bias_index),
      histories(layers.histories),
      rng(layers.rng),
      groups(layers.groups) {
  if (layers.shards.sharding) sharding = *layers.shards.sharding;
  for (const Tensor& w : layers.weights) {
    weight_dtypes.push_back(w.scalar_type());
    const bool is_cast =
        layers.prequantized.weight.empty() || w.key_set().has(c10::DispatchKey::Python);
    product_dtypes.push_back(is_cast || !is_autocast(w) ? w.scalar_type() : dtype);
  }
  for (std::size_t i = 0; i < layers.weights.size(); ++i) features.push_back(layers.features_of(i));
  for (const Tensor& b : layers.biases) bias_dtypes.push_back(b.scalar_type());
}

CastContext SavedLayers::state_of(std::size_t i) const {
  return state_of_weight(*this, i, sharding ? &*sharding : nullptr, features[i]);
}

CastContext SavedLayers::state_of_rows(std::size_t i) const {
  return in_groups(state_of(i), groups, recipe);
}

ProductInput backward_input(const SavedLayers& layers, const QuantizedOperand& operand,
                            Place place) {
  const PreparedRecipe& recipe = layers.recipe;
  const Spec& spec = recipe.spec_of_codes(place);
  if (!recipe.specs[place].is_of_forward())
    return cast_input(spec, operand.codes, operand.scale, amax_of_codes(spec, operand));
  // No gradient needs it: undefined, or of no dimensions of a matrix where code is traced.
  if (!operand.codes.defined() || operand.codes.dim() < 2) return {};
  // Layers that share x have as many input features.
  const SymInt& k = layers.features[0][1];
  std::optional<Tensor> table;
  if (layers.groups && place == kWgradX) table = layers.groups->table;
  return values_of_forward(recipe, place, operand, k, layers.x_dtype, table);
}

ProductInput saved_input(const SavedLayers& layers, const std::vector<Tensor>& saved, std::size_t i,
                         Place place) {
  return backward_input(layers, {saved[i], saved[i + 1], saved[i + 2], Tensor()}, place);
}

ProductInput saved_weight(const SavedLayers& layers, const std::vector<Tensor>& saved,
                          std::size_t i) {
  // A weight that is saved itself has values; codes are bytes. A checkpoint's second forward may
  // save the one where the first saved the other.
  const Tensor &first = saved[3 * (i + 1)], &amax = saved[3 * (i + 1) + 2];
  const PreparedRecipe& recipe = layers.recipe;
  if (!first.defined() || !first.is_floating_point() || recipe.reads_values(kDgradW))
    return saved_input(layers, saved, 3 * (i + 1), kDgradW);
  const bool is_experts = layers.groups.has_value();
  CastContext state = layers.state_of(i);
  const OperandUse col{
      .place = kDgradW,
      .decoded = decodes(layers.dgrad(first.device()), state.sharding, is_experts)};
  if (amax.defined()) state.amax = amax;
  state.is_raised =
      state.sharding && has_amax_of_history(recipe.specs[kFpropW], recipe.specs[kDgradW]);
  const Tensor w = matrices_of(to_dtype(first, layers.x_dtype), is_experts);
  const QuantizedOperand again = quantize_weight(recipe, w, {kFpropW, false}, col, state).second;
  if (recipe.specs[kDgradW].is_of_forward()) return backward_input(layers, again, kDgradW);
  return product_input(recipe, again, col);
}

Tensor input_gradient(const SavedLayers& layers, const QuantizedOperand& g, const OperandUse& row,
                      const ProductInput& weight, const SymInt& n, at::ScalarType dtype,
                      const at::Device& device) {
  return scaled_mm(layers.dgrad(device), product_input(layers.recipe, g, row), weight, n,
                   std::nullopt, dtype, groups_of(layers.groups, 0),
                   layers.groups && layers.groups->zeroes_tail);
}

Tensor weight_gradient(const SavedLayers& layers, std::size_t i, const QuantizedOperand& g,
                       const OperandUse& col, const ProductInput& x, const SymInt& m,
                       const at::Device& device, std::size_t edge) {
  const PlannedProduct wgrad = layers.wgrad(device);
  const ProductInput of_g = product_input(layers.recipe, g, col);
  const auto product = [&](const Groups& groups) {
    return to_dtype(scaled_mm(wgrad, of_g, x, m, std::nullopt, layers.product_dtypes[i], groups),
                    layers.weight_dtypes[i]);
  };
  if (layers.groups)
    return product(groups_of(layers.groups, wgrad_unit(layers.recipe))).transpose(-2, -1);
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
  return product({});
}

Tensor bias_gradient(const SavedLayers& layers, int bias, const Tensor& g) {
  return to_dtype(
      layers.groups ? sum_of_groups(g, layers.groups->table) : g.sum(0, false, at::kFloat),
      layers.bias_dtypes[static_cast<std::size_t>(bias)]);
}

}  // namespace minifloat::torch_ops
