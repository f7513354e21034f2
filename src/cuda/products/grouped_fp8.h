// The kernels of grouped FP8 products: one for each format of a, and accumulation.
#pragma once

#include "minifloat/grouped_product.h"

namespace minifloat::cuda {

void grouped_fp8_product(const GroupedFp8Product& product, const Execution& execution);

// One launch of each; grouped_fp8.cu chooses.
void grouped_e4m3_product(const GroupedFp8Product& product, const Execution& execution);
void grouped_e5m2_product(const GroupedFp8Product& product, const Execution& execution);

}  // namespace minifloat::cuda
