#include "layers/expert_weights.h"

#include <ATen/ATen.h>

#include <utility>

#include "ops/direct.h"

namespace minifloat::torch_ops {
namespace {

// Returns whether the sums of Four Over Six run along the rows of W, where blocks are 2D.
bool reads_rows(const PreparedRecipe& recipe) {
  const auto reads = [&](Place place) {
    return recipe.specs[place].reads_values() && recipe.specs[place].has_blocks_2d();
  };
  return reads(kFpropW) || reads(kDgradW);
}

}  // namespace

Tensor transposed_matrices(const Tensor& t) {
  const Tensor view = t.permute({0, 2, 1});
  share_version(view, t);
  return view;
}

bool has_adjacent_columns(const Tensor& t) {
  return (t.sym_stride(-1) == 1 || t.sym_size(-1) == 1) && t.sym_stride(-2) >= t.sym_size(-1);
}

Directions quantize_expert_weights(const PreparedRecipe& recipe, const Tensor& w,
                                   const OperandUse& row, const OperandUse& col,
                                   const CastContext& state) {
  if (has_adjacent_columns(w)) return quantize_both(recipe, w, row, col, state);
  if (recipe.specs[kDgradW].is_of_forward() && col.is_needed) {
    CastContext of_codes = state;
    if (state.amax) of_codes.amax_of_rowwise = std::exchange(of_codes.amax, std::nullopt);
    Directions out = quantize_expert_weights(recipe, w, {kFpropW}, {kDgradW, false}, of_codes);
    out.second = out.first;
    if (!row.is_needed) out.first = {};
    return out;
  }
  const Tensor transpose = transposed_matrices(w);
  // Ranks cut W, not its transpose.
  if (!has_adjacent_columns(transpose) || reads_rows(recipe) || state.sharding)
    return quantize_both(recipe, w.contiguous(), row, col, state);
  Directions out = quantize_both(recipe, transpose, col, row, state);
  std::swap(out.first, out.second);
  return out;
}

}  // namespace minifloat::torch_ops
