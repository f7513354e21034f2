// Which compiled kernel takes a quantization: a table by format and rounding, filled by general_<format>.cu.
#pragma once

#include "minifloat/quantize.h"

namespace minifloat::cuda {

struct QuantizeArgs;  // general.cuh

// One direction of x.
void launch_cast_e4m3(const QuantizeArgs& args, bool columnwise, const Execution& execution);
void launch_cast_e5m2(const QuantizeArgs& args, bool columnwise, const Execution& execution);
void launch_cast_e2m1(const QuantizeArgs& args, bool columnwise, const Execution& execution);
void launch_cast_e2m1_by_values(const QuantizeArgs& args, bool columnwise,
                                const Execution& execution);

// Rowwise with a scale a row, whose amax comes from the same read: a block holds a whole row. False where
// they do not fit; nothing is launched then.
bool launch_whole_rows(const QuantizeArgs& args, const Execution& execution);

// What presets ask for on whole vec16s or tiles of bf16; false: nothing is launched.
bool launch_preset(const QuantizeArgs& args, bool rowwise, bool columnwise,
                   const Execution& execution);

// Small matrices whose own amaxes the casts themselves find (KernelOperand::current_amax), in one launch; false: nothing is
// launched. fits_one_cluster: whether x is so small.
bool fits_one_cluster(const QuantizeArgs& args);
bool launch_one_cluster(const QuantizeArgs& args, bool rowwise, bool columnwise,
                        const Execution& execution);

// Both directions of the same 2D blocks of FP4, where their codes are computed once; whole tiles of bf16. False:
// nothing is launched.
bool launch_blocks_2d(const QuantizeArgs& args, const Execution& execution);

// Both from one read, where a kernel for the pair is compiled; false: nothing is launched.
bool launch_both(const QuantizeArgs& args, const Execution& execution);

}  // namespace minifloat::cuda
