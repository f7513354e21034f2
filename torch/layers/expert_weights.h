// The transposes and the casts of experts' weights, W (E, N, K), whose rows or columns are adjacent
// in memory. Neither is copied; any other layout is. All give the same bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include "layers/operands.h"

namespace minifloat::torch_ops {

// Returns the transpose of each matrix, a view. A compiler's partitioner computes this op again in
// backward, where it saves the results of at::transpose.
Tensor transposed_matrices(const Tensor& t);

// Returns whether the columns of each matrix are adjacent, without overlap.
bool has_adjacent_columns(const Tensor& t);

// Quantizes W rowwise for fprop and columnwise for dgrad.
Directions quantize_expert_weights(const PreparedRecipe& recipe, const Tensor& w,
                                   const OperandUse& row, const OperandUse& col,
                                   const CastContext& state);

}  // namespace minifloat::torch_ops
