// The casts of normalised values by tiles to FP8.
#include "cuda/norm/quantize_norm_tiles.cuh"

namespace minifloat::cuda {

bool launch_norm_tiles_fp8(const NormArgs& of, const RowStatistics* statistics,
                           const QuantizeArgs& args, bool rowwise, const Execution* execution) {
  using namespace preset;
  const NormTileCast cast = {of, statistics, args, execution};
  if (rowwise)
    return cast.try_both<Nearest<kTensor, E4M3>>() || cast.try_both<Nearest<kRow, E4M3>>() ||
           cast.try_both<Nearest<kBlock, E4M3>>() || cast.try_both<Mxfp8>();
  return cast.try_column<Nearest<kTensor, E4M3>>() || cast.try_column<Nearest<kRow, E4M3>>() ||
         cast.try_column<Nearest<kBlock, E4M3>>() || cast.try_column<Mxfp8>();
}

}  // namespace minifloat::cuda
