#include "layers/linear_gradients.h"

#include <optional>

namespace minifloat::torch_ops {
namespace {

// Begins to gather x as wgrad reads x, with the tokens of all ranks.
//   returns the gather; none: that of the layers that share x has begun
std::optional<TokenGather> begin_gather(const SavedLayers& layers, const CutInput& cut,
                                        const TokenRuns& runs, const std::vector<Tensor>& saved) {
  const QuantizedOperand shard{saved[0], saved[1], saved[2], Tensor()};
  const bool columnwise = !layers.recipe.specs[kWgradX].is_of_forward();
  if (!cut.gathered) return TokenGather(*layers.sharding, runs, shard, columnwise);
  cut.gathered->begin(*layers.sharding, runs, shard, columnwise);
  return std::nullopt;
}

}  // namespace

LayerGradients linear_gradients(const SavedLayers& layers, const NeededGradients& needs,
                                std::size_t i, const Tensor& grad, ProductInput& x,
                                const std::vector<Tensor>& saved, const CutInput& cut) {
  const PreparedRecipe& recipe = layers.recipe;
  const Tensor g = as_matrix("linear", "gradient", grad);
  const SymInt m = g.sym_size(0), n = g.sym_size(1);
  const PlannedProduct dgrad = layers.dgrad(g.device()), wgrad = layers.wgrad(g.device());
  const Sharding* sharding = layers.sharding ? &*layers.sharding : nullptr;
  const OperandUse row{kDgradG, needs.dx, !sharding && dgrad.reads_values()};
  const OperandUse col{kWgradG, needs.dw[i], !sharding && wgrad.reads_values()};
  LayerGradients out;
  Directions of_g = quantize_both(recipe, g, row, col, layers.state_of_rows(i));
  const bool is_cut = sharding && sharding->token_dim;
  const TokenRuns runs = is_cut ? token_runs(*sharding, cut.shape) : TokenRuns{};
  // x is gathered beside dgrad, and dx is summed beside wgrad.
  std::optional<TokenGather> gather;
  if (col.is_needed && is_cut) gather = begin_gather(layers, cut, runs, saved);
  if (row.is_needed)
    out.x = input_gradient(layers, of_g.first, row, saved_weight(layers, saved, i), n,
                           g.scalar_type(), g.device());
  of_g.first = {};  // its memory may serve wgrad
  const bool is_sum = row.is_needed && sharding && (is_cut || sharding->sums_dx);
  if (is_sum)
    out.x = is_cut ? begin_scatter_sum(*sharding, runs, out.x) : begin_sum(sharding->group, out.x);
  if (col.is_needed) {
    if (is_cut)
      x = backward_input(layers, gather ? gather->finish() : cut.gathered->get(), kWgradX);
    if (layers.product_dtypes.size() > 1)
      x = prepare_input(wgrad, recipe.recipe.wgrad.b, std::move(x), m);
    out.weight = weight_gradient(layers, i, of_g.second, col, x, m, g.device(), 1 + i);
  }
  if (is_sum) out.x = wait_for(out.x);
  const int bias = layers.bias_index[i];
  if (bias >= 0 && needs.db[static_cast<std::size_t>(bias)])
    out.bias = bias_gradient(layers, bias, g);
  return out;
}

}  // namespace minifloat::torch_ops
