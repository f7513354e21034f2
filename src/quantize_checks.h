// The checks of a cast's arguments, for each function that casts.
#pragma once

#include "minifloat/quantize.h"

namespace minifloat {

// Checks the arguments of `quantize`.
void check_quantize(const TensorRef& x, const Operand* rowwise, const Operand* columnwise);

}  // namespace minifloat
