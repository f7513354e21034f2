// The kernels of grouped products: one for each format of a, its scales and the accumulation.
#pragma once

#include "minifloat/grouped_product.h"

namespace minifloat::cuda {

void grouped_product(const GroupedProduct& product, const Execution& execution);

// One launch of each; grouped.cpp chooses.
void grouped_e4m3_product(const GroupedProduct& product, const Execution& execution);
void grouped_e5m2_product(const GroupedProduct& product, const Execution& execution);
void grouped_bf16_product(const GroupedProduct& product, const Execution& execution);
void grouped_blocks_by_rows(const GroupedProduct& product, const Execution& execution);
void grouped_blocks_by_columns(const GroupedProduct& product, const Execution& execution);

}  // namespace minifloat::cuda
