// The amaxes that casts of gradients and of h scale by, from one read of dh, gate and up.
//
//     bytes an element: 6 read
#include "cuda/activation/gradient_tile.cuh"
#include "cuda/activation/quantize_swiglu.h"
#include "cuda/activation/required_amaxes.h"
#include "cuda/activation/tile_amaxes.cuh"

namespace minifloat::cuda {
namespace {

// What is found of a tile in shared memory, besides the amaxes of whole matrices.
enum class InTile { kNothing, kRowsAndColumns, kTransformed, kRowsAndTransformed };

// Takes the amaxes of a matrix's tile by one half of the block or both.
template <InTile kInTile>
__device__ __forceinline__ void take_amaxes_of_tile(const SharedTile<Bf16>& tile,
                                                    const TilePlace& place, int matrix,
                                                    const SwiGluAmaxes& amaxes,
                                                    std::uint32_t* transformed) {
  const bool is_first_half = threadIdx.x < kThreads;
  if constexpr (kInTile == InTile::kRowsAndColumns) {
    if (is_first_half && amaxes.rows[matrix])
      raise_lines<false>(tile, amaxes.rows[matrix] + place.row);
    if (!is_first_half && amaxes.cols[matrix])
      raise_lines<true>(tile, amaxes.cols[matrix] + place.col);
  } else if constexpr (kInTile == InTile::kRowsAndTransformed) {
    if (is_first_half && amaxes.rows[matrix])
      raise_lines<false>(tile, amaxes.rows[matrix] + place.row);
    if (is_first_half != (matrix == 1) || !amaxes.transformed_cols[matrix]) return;
    const std::uint32_t m =
        warp_max(raise_transformed_columns(tile, amaxes.transformed_cols[matrix] + place.col));
    if (threadIdx.x % 32 == 0) atomicMax(transformed, m);
  } else if (is_first_half == (matrix % 2 == 0) && amaxes.transformed[matrix]) {
    const std::uint32_t m = warp_max(amax_of_tile<true>(tile));
    if (threadIdx.x % 32 == 0) atomicMax(transformed, m);
  }
}

template <InTile kInTile>
__global__ void __launch_bounds__(kGradientThreads, 2)
    amax_of_gradients(const __grid_constant__ GradientArgs args,
                      const __grid_constant__ SwiGluAmaxes amaxes) {
  extern __shared__ __align__(16) std::uint32_t words[];
  __shared__ std::uint32_t largest[6];  // of matrices, and of transformed ones
  const GradientTile tiles = {words};
  const TilePlace place = gradient_place(args);
  const GradientChunk loaded = tiles.first(args, place);
  if (threadIdx.x < 6) largest[threadIdx.x] = 0;
  __syncthreads();
  LargestPairs pairs;
  tiles.compute<kInTile != InTile::kNothing>(args, place, loaded, pairs);
  raise_in_block(pairs, largest);
  if constexpr (kInTile != InTile::kNothing) {
    __syncthreads();
#pragma unroll 1
    for (int matrix = 0; matrix < 3; ++matrix) {
      if ((matrix == 1 && !args.has_h) || (matrix == 2 && !args.of.up)) continue;
      take_amaxes_of_tile<kInTile>(tiles.tile(matrix), place, matrix, amaxes, largest + 3 + matrix);
    }
  }
  __syncthreads();
  if (threadIdx.x >= 6) return;
  std::uint32_t* const out =
      threadIdx.x < 3 ? amaxes.whole[threadIdx.x] : amaxes.transformed[threadIdx.x - 3];
  if (out) atomicMax(out, largest[threadIdx.x]);
}

template <InTile kInTile>
void launch(const GradientArgs& args, const SwiGluAmaxes& amaxes, const Execution& execution) {
  constexpr const char* kName = "quantize_swiglu_backward";
  const auto kernel = amax_of_gradients<kInTile>;
  allow_shared(kernel, args.shared_bytes(), kName);
  const std::int64_t tiles = args.of.rows / kTile * args.across.d;
  kernel<<<grid_of(tiles, kName), kGradientThreads, args.shared_bytes(), cuda_stream(execution)>>>(
      args, amaxes);
  check_launch(kName);
}

}  // namespace

void find_gradient_amaxes(const GradientArgs& args, const SwiGluAmaxes& amaxes,
                          const Execution& execution) {
  if (amaxes.of_each_transformed())
    launch<InTile::kRowsAndTransformed>(args, amaxes, execution);
  else if (amaxes.of_rows_or_columns())
    launch<InTile::kRowsAndColumns>(args, amaxes, execution);
  else if (amaxes.of_transformed())
    launch<InTile::kTransformed>(args, amaxes, execution);
  else
    launch<InTile::kNothing>(args, amaxes, execution);
}

}  // namespace minifloat::cuda
