// The casts of normalised values by tiles to FP4, or to FP4 and FP8; and the amax of transformed
// columns, by which those of NVFP4 scale.
#include "cuda/norm/quantize_norm_tiles.cuh"

namespace minifloat::cuda {
namespace {

__global__ void __launch_bounds__(kThreads, 4)
    amax_of_transformed_norm(const __grid_constant__ NormArgs of, const RowStatistics* statistics,
                             std::uint32_t* out, const __grid_constant__ Tiles tiles) {
  extern __shared__ __align__(16) std::uint32_t words[];
  const SharedTile<Bf16> shared = {words};
  fill_with_norm(of, statistics, tile_place(tiles), shared);
  __syncthreads();
  std::uint32_t m = 0;
  shared.template each_vec<true>([&](const auto& vec, unsigned) {
    m = max(m, hadamard_vec(vec, kVec, kHadamardSigns).amax());
  });
  raise_by_block(out, canonical_magnitude(m));
}

}  // namespace

void find_transformed_amax(const NormArgs& of, const FoundNorm& found, const Execution& execution) {
  const Tiles tiles = tiles_of(of.x);
  amax_of_transformed_norm<<<tile_grid(1, tiles, "quantize_norm"), kThreads,
                             SharedTile<Bf16>::kBytes, cuda_stream(execution)>>>(
      of, found.statistics, found.transformed, tiles);
  check_launch("quantize_norm");
}

bool launch_norm_tiles_fp4(const NormArgs& of, const RowStatistics* statistics,
                           const QuantizeArgs& args, bool rowwise, const Execution* execution) {
  return launch_norm_tiles<preset::Formats::kWithFp4>(of, statistics, args, rowwise, execution);
}

}  // namespace minifloat::cuda
