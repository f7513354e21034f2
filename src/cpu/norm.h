// The CPU backend of minifloat/norm.h.
#pragma once

#include "minifloat/norm.h"

namespace minifloat::cpu {

void norm(const Norm& of, void* y, const Execution& execution);
void quantize_norm(const Norm& of, const Operand* rowwise, const Operand* columnwise,
                   const Execution& execution);
void norm_statistics(const Norm& of, float* factors, float* means, const Execution& execution);

}  // namespace minifloat::cpu
