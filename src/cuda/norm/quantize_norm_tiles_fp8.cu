// The casts of normalised values by tiles to FP8.
#include "cuda/norm/quantize_norm_tiles.cuh"

namespace minifloat::cuda {

bool launch_norm_tiles_fp8(const NormArgs& of, const RowStatistics* statistics,
                           const QuantizeArgs& args, bool rowwise, const Execution* execution) {
  return launch_norm_tiles<preset::Formats::kFp8>(of, statistics, args, rowwise, execution);
}

}  // namespace minifloat::cuda
