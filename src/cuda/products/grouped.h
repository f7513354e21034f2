// The kernels of grouped products, for each format of a and of its scales.
#pragma once

#include "minifloat/grouped_product.h"

namespace minifloat::cuda {

void grouped_product(const GroupedProduct& product, const Execution& execution);

// grouped.cpp chooses among these. The products of FP8 codes also choose by the accumulation.
void grouped_e4m3_product(const GroupedProduct& product, const Execution& execution);
void grouped_e5m2_product(const GroupedProduct& product, const Execution& execution);
void grouped_bf16_product(const GroupedProduct& product, const Execution& execution);
void grouped_blocks_by_rows(const GroupedProduct& product, const Execution& execution);
void grouped_blocks_by_columns(const GroupedProduct& product, const Execution& execution);

// The current device, and its number of SMs, asked once for each device.
struct DeviceSms {
  int device = 0, sms = 0;
};
DeviceSms current_device_sms();

}  // namespace minifloat::cuda
