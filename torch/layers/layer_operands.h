// Operands that are cast before the op of the layer that reads them, for caches, inputs that layers
// share and experts: of x, or of values that a kernel computes and casts at once. They are the
// eight tensors that the op layer_operands returns. A layer without them casts in its own op
// (operands.h).
#pragma once

#include <vector>

#include "layers/operands.h"
#include "ops/activation.h"

namespace minifloat::torch_ops {

// Returns the operands of x (M, K) in groups, or of its rows that groups.rows_from names.
//   amax: of the columnwise operand's groups; undefined: the cast finds it
std::vector<Tensor> operands_of_rows(const PreparedRecipe& recipe, const Tensor& x, bool rowwise,
                                     bool columnwise, const Groups& groups,
                                     const Tensor& amax = {});

// Returns the operands of the matrix `like`, or of what state.cast quantizes where there is one,
// whose shape, dtype and device `like` has. Nothing is returned of a direction under bf16, which
// reads the values themselves.   op: for errors
std::vector<Tensor> operands_of_values(const char* op, const PreparedRecipe& recipe,
                                       const Tensor& like, bool rowwise, bool columnwise,
                                       const CastContext& state);

// Returns those of swiglu's result. state: of the product that reads it; its groups are of's
std::vector<Tensor> operands_of_swiglu(const ActivationArguments& of, const PreparedRecipe& recipe,
                                       bool rowwise, bool columnwise, CastContext state);

}  // namespace minifloat::torch_ops
