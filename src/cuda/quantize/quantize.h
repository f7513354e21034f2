// The kernels that quantize.cu chooses from: the general ones (general*.cu), and the faster ones
// (row_scaled.cu, preset_*.cu and one_cluster.cu).
#pragma once

#include "minifloat/quantize.h"

namespace minifloat::cuda {

struct QuantizeArgs;  // general.cuh

// Launches a kernel that casts all directions of args.
using LaunchCast = void (*)(const QuantizeArgs& args, const Execution& execution);

// Returns the first launch that one of `finds` returns for args; null where none does.
template <class... Finds>
LaunchCast first_of(const QuantizeArgs& args, const Finds&... finds) {
  LaunchCast found = nullptr;
  return ((found = finds(args)) || ...) ? found : nullptr;
}

// Cast one direction of x; the latter under a scale rule that reads values.
void launch_general(const QuantizeArgs& args, const Execution& execution);
void launch_general_reading_values(const QuantizeArgs& args, const Execution& execution);

// Each of the functions below returns the launch of its kernel for the directions, specs and sizes
// of args; null where it has none. It launches nothing, and reads none of the amaxes that args gets
// later.

// One rowwise cast with a scale a row, whose amax comes from the same read: a warp or a block holds
// a whole row. The latter also finds the amaxes of the columns of bf16 matrices.
LaunchCast find_whole_rows(const QuantizeArgs& args);
LaunchCast find_rows_and_amaxes_of_columns(const QuantizeArgs& args);

// Preset kernels of bf16 matrices. find_preset_rows: rowwise, rows of whole vec16s.
// find_preset_tiles: columnwise or both directions, whole tiles. Directions with
// KernelOperand::row_scale are written as FP8.
LaunchCast find_preset_rows(const QuantizeArgs& args);
LaunchCast find_preset_tiles(const QuantizeArgs& args);

// A preset kernel, rowwise, of one bf16 or fp32 matrix of long rows of whole vec16s, which may lie
// apart in memory or in the operand.
LaunchCast find_preset_strided_rows(const QuantizeArgs& args);

// One direction of bf16 matrices by MS-EDEN: whole transforms rowwise, whole tiles columnwise.
LaunchCast find_preset_eden(const QuantizeArgs& args);

// A preset kernel of both directions of fp32 matrices of whole tiles.
LaunchCast find_preset_fp32_tiles(const QuantizeArgs& args);

// Preset kernels of groups of bf16: rowwise, as find_preset_rows has them, and of the matrices of a
// batch as well; or columnwise, and rowwise as well where that is cast, groups of whole columns.
LaunchCast find_preset_group_rows(const QuantizeArgs& args);
LaunchCast find_preset_group_tiles(const QuantizeArgs& args);

// One launch for small matrices, whose current amaxes the casts themselves compute
// (KernelOperand::current_amax). fits_one_cluster returns whether x is so small.
bool fits_one_cluster(const QuantizeArgs& args);
LaunchCast find_one_cluster(const QuantizeArgs& args);

// Both directions of the same 2D blocks of FP4, whose codes are computed once; whole tiles of bf16.
LaunchCast find_blocks_2d(const QuantizeArgs& args);

// A general kernel of both directions, of a pair of specs that layers use.
LaunchCast find_pair(const QuantizeArgs& args);

// Casts operands of which one or both are written as FP8: by one kernel, or in two steps.
void quantize_as_fp8(const TensorRef& x, const Operand* rowwise, const Operand* columnwise,
                     const Execution& execution);

// Casts rowwise to FP4 that is written as FP8, by the amaxes of x and of its rows. Returns false,
// and launches nothing, where one kernel cannot.
bool quantize_rows_as_fp8(const TensorRef& x, const Operand& rowwise, const float* amax,
                          const std::uint32_t* amaxes_of_rows, const Execution& execution);

}  // namespace minifloat::cuda
