// The launches that quantize.cu chooses from: of the general kernels (general*.cu), and of the
// faster ones (row_scaled.cu, preset_*.cu and one_cluster.cu).
#pragma once

#include "minifloat/quantize.h"

namespace minifloat::cuda {

struct QuantizeArgs;  // general.cuh

// Cast one direction of x; the latter under a scale rule that reads values.
void launch_general(const QuantizeArgs& args, bool columnwise, const Execution& execution);
void launch_general_reading_values(const QuantizeArgs& args, bool columnwise,
                                   const Execution& execution);

// Cast rowwise with a scale a row, whose amax comes from the same read: a warp or a block holds a
// whole row. The latter also finds the amaxes of the columns of bf16 matrices. Return false, and
// launch nothing, where the rows do not fit.
bool launch_whole_rows(const QuantizeArgs& args, const Execution& execution);
bool launch_rows_and_amaxes_of_columns(const QuantizeArgs& args, const Execution& execution);

// Cast by a preset kernel: rowwise, matrices of whole vec16s; or columnwise, and rowwise as well
// where that is set, matrices of whole tiles. Directions with KernelOperand::row_scale are written
// as FP8. Return false, and launch nothing, where no preset kernel fits.
bool launch_preset_rows(const QuantizeArgs& args, const Execution& execution);
bool launch_preset_tiles(const QuantizeArgs& args, bool rowwise, const Execution& execution);

// Casts rowwise, by a preset kernel, one bf16 or fp32 matrix of long rows of whole vec16s, which
// may lie apart in memory or in the operand. Returns false, and launches nothing, where none fits.
bool launch_preset_pitched_rows(const QuantizeArgs& args, const Execution& execution);

// Casts one direction of bf16 matrices by MS-EDEN: whole transforms rowwise, whole tiles
// columnwise. Returns false, and launches nothing, for other operands.
bool launch_preset_eden(const QuantizeArgs& args, bool columnwise, const Execution& execution);

// Casts both directions of fp32 matrices of whole tiles by a preset kernel. Returns false, and
// launches nothing, where none fits.
bool launch_preset_fp32_tiles(const QuantizeArgs& args, const Execution& execution);

// Cast groups by a preset kernel: rowwise, as launch_preset_rows does, and the matrices of a batch
// as well; or columnwise, and rowwise as well where that is set, groups of whole columns. Return
// false, and launch nothing, where no preset kernel fits.
bool launch_preset_group_rows(const QuantizeArgs& args, const Execution& execution);
bool launch_preset_group_tiles(const QuantizeArgs& args, bool rowwise, const Execution& execution);

// Casts small matrices whose current amaxes the casts themselves compute
// (KernelOperand::current_amax), in one launch. Returns false, and launches nothing, where no
// kernel for the specs is compiled. fits_one_cluster returns whether x is so small.
bool fits_one_cluster(const QuantizeArgs& args);
bool launch_one_cluster(const QuantizeArgs& args, bool rowwise, bool columnwise,
                        const Execution& execution);

// Casts both directions of the same 2D blocks of FP4, whose codes are computed once; whole tiles of
// bf16. Returns false, and launches nothing, for other operands.
bool launch_blocks_2d(const QuantizeArgs& args, const Execution& execution);

// Casts both directions from one read. Returns false, and launches nothing, where no kernel for the
// pair is compiled.
bool launch_both(const QuantizeArgs& args, const Execution& execution);

// Casts operands of which one or both are written as FP8: by one kernel, or in two steps.
void quantize_as_fp8(const TensorRef& x, const Operand* rowwise, const Operand* columnwise,
                     const Execution& execution);

// Casts rowwise to FP4 that is written as FP8, by the amaxes of x and of its rows. Returns false,
// and launches nothing, where one kernel cannot.
bool quantize_rows_as_fp8(const TensorRef& x, const Operand& rowwise, const float* amax,
                          const std::uint32_t* amaxes_of_rows, const Execution& execution);

// Casts values that the cast's kernel computes: `launch` is passed the plans of the directions and
// `context`. It writes both directions and their amaxes, or returns false and launches nothing.
//   x: shape, dtype and groups of the values
// Returns false where the scales need an amax that only another pass finds, where a preset kernel's
// conditions do not hold, where an operand is written as FP8, or where launch does.
using LaunchCast = bool (*)(const QuantizeArgs& args, bool rowwise, bool columnwise,
                            const void* context, const Execution& execution);
bool quantize_by(const TensorRef& x, const Operand* rowwise, const Operand* columnwise,
                 LaunchCast launch, const void* context, const Execution& execution);

}  // namespace minifloat::cuda
