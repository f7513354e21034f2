// The outputs of casts, which calls of several files have.
#pragma once

#include "fuzz/call.h"
#include "minifloat/quantize.h"

namespace minifloat::fuzz {

// Draws the outputs of one direction of x under to.spec.
void add_operand(Call& call, const TensorRef& x, Operand& to, bool columnwise);

}  // namespace minifloat::fuzz
