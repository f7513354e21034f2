// The preset casts of fp32 matrices by tiles, in both directions: master weights.
#include "cuda/quantize/preset_matrix_tiles.cuh"

namespace minifloat::cuda {

LaunchCast find_preset_fp32_tiles(const QuantizeArgs& args) {
  const bool is_fit = !args.is_bf16 && args.rowwise;
  return is_fit ? find_matrix_tiles<float, kFp32TilesWalk>(args) : nullptr;
}

}  // namespace minifloat::cuda
