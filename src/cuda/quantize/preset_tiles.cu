// The preset casts of bf16 matrices by tiles.
#include "cuda/quantize/preset_matrix_tiles.cuh"

namespace minifloat::cuda {

LaunchCast find_preset_tiles(const QuantizeArgs& args) {
  return args.is_bf16 ? find_matrix_tiles<Bf16, kTilesWalk>(args) : nullptr;
}

}  // namespace minifloat::cuda
