// The CUDA backend of minifloat/norm.h: nothing waits for the device.
#pragma once

#include "minifloat/norm.h"

namespace minifloat::cuda {

void norm(const Norm& of, void* y, const Execution& execution);
void quantize_norm(const Norm& of, const Operand* rowwise, const Operand* columnwise,
                   const Execution& execution);
void norm_statistics(const Norm& of, float* factors, float* means, const Execution& execution);

}  // namespace minifloat::cuda
