// The operands of values that a kernel computes and casts at once, as the x of a product.
#pragma once

#include <vector>

#include "layers/operands.h"

namespace minifloat::torch_ops {

// Returns the eight tensors that the op layer_operands returns of x, from state.cast. Nothing is
// returned of a direction under bf16, which reads the values themselves.
//   op: for errors; like: a matrix of the shape, dtype and device of the values
std::vector<Tensor> operands_of_computed(const char* op, const PreparedRecipe& recipe,
                                         const Tensor& like, bool rowwise, bool columnwise,
                                         const ModuleState& state);

}  // namespace minifloat::torch_ops
