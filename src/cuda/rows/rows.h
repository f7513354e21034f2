// The CUDA backend of minifloat/experts.h's copies between tokens and rows: nothing waits for the
// device.
#pragma once

#include "minifloat/experts.h"

namespace minifloat::cuda {

void take_rows(const TakeRows& copy, const Execution& execution);
void pack_rows(const PackRows& pack, const Execution& execution);
void add_slots(const AddSlots& sum, const Execution& execution);

}  // namespace minifloat::cuda
