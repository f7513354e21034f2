// The kernels that quantize_norm.cu chooses from. bf16 rows of at most 16384 columns, in whole
// vec16s that start at multiples of 16 bytes.
#pragma once

#include <cstdint>

#include "minifloat/norm.h"

namespace minifloat::cuda {

struct QuantizeArgs;  // quantize/general.cuh
struct NormArgs;      // row.cuh

// What the first pass finds; null: not written. Amaxes are bits, zero before.
struct FoundNorm {
  RowStatistics* statistics;           // (rows)
  std::uint32_t *whole, *transformed;  // of y, and of its columns of 16 points transformed
  std::uint32_t *rows, *cols;          // (rows), (cols)
};

// Reads x, and finds all but `transformed`.
void find_norm(const NormArgs& of, const FoundNorm& found, const Execution& execution);
// Raises `transformed`, from the statistics. Whole tiles.
void find_transformed_amax(const NormArgs& of, const FoundNorm& found, const Execution& execution);

// Casts columnwise, and rowwise as well where that is set, from the statistics. Whole tiles.
// Returns false, and launches nothing, where no kernel is compiled for the specs. execution: null
// to ask
bool launch_norm_tiles_fp8(const NormArgs& of, const RowStatistics* statistics,
                           const QuantizeArgs& args, bool rowwise, const Execution* execution);
bool launch_norm_tiles_fp4(const NormArgs& of, const RowStatistics* statistics,
                           const QuantizeArgs& args, bool rowwise, const Execution* execution);

// Casts rowwise from one read of x. Returns false, and launches nothing, where no kernel is
// compiled for the spec, or rows are longer than 8192 columns. execution: null to ask
bool launch_norm_rows_fp8(const NormArgs& of, const QuantizeArgs& args, const Execution* execution);
bool launch_norm_rows_fp4(const NormArgs& of, const QuantizeArgs& args, const Execution* execution);

}  // namespace minifloat::cuda
