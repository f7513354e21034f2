// The form in which a layer's cast writes an operand, by the engine of the product that reads it.
#pragma once

#include "layers/operands.h"

namespace minifloat::torch_ops {

// Returns whether the cast writes an FP4 operand as FP8: where the product that follows reads FP8,
// and nothing else reads the operand. x and the weight of backward are saved, and stay FP4, unless
// backward casts x anew. mxfp4 stays FP4 too: its cast finds no amax of a row before it writes.
bool writes_fp8(const PreparedRecipe& recipe, const Tensor& x, const OperandUse& needed,
                const CastContext& state);

// Returns whether the cast writes swizzled scales: where the product that reads the operand, now or
// in backward, reads them. Dequantization does not; of what an op returns its caller decided.
// Products that the engine leaves to the next one undo the layout.
bool writes_swizzled(const PreparedRecipe& recipe, const Tensor& x, const OperandUse& needed,
                     const CastContext& state);

}  // namespace minifloat::torch_ops
