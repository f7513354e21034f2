// The kernels of grouped products. src/grouped_product.cpp checks the arguments.
#pragma once

#include "minifloat/grouped_product.h"

namespace minifloat::cuda {

void grouped_product(const GroupedProduct& product, const Execution& execution);

}  // namespace minifloat::cuda
