// The preset casts of fp32 values in both directions, from one read: master weights. Whole tiles,
// each of 64 KiB of shared memory.
//
//     bytes an element: 4 of x, 1 or 1/2 of codes a direction
#include "cuda/quantize/preset_table.cuh"
#include "cuda/quantize/preset_tile.cuh"

namespace minifloat::cuda {
namespace {

template <class C>
__global__ void __launch_bounds__(kThreads, 3)
    quantize_fp32_tile(const __grid_constant__ KernelInput x,
                       const __grid_constant__ KernelOperand row,
                       const __grid_constant__ KernelOperand col,
                       const __grid_constant__ Tiles tiles) {
  extern __shared__ __align__(16) std::uint32_t words[];
  __shared__ std::uint32_t amaxes_2d[kBlocks2d];
  __shared__ Whole whole[2];
  const TilePlace tile = tile_place(tiles);
  const bool is_first = tile.row == 0 && tile.col == 0;
  const SharedTile<float> shared = {words};
  shared.fill<true>(x, tile);
  if (threadIdx.x == 0) prepare<C>(row, whole[0], tile.batch, is_first);
  if (threadIdx.x == 32) prepare<C>(col, whole[1], tile.batch, is_first);
  shared.wait();
  cast_preset_tile<C, false, false, false>(row, whole[0], shared, tile_of_matrix<false>(row, tile),
                                           amaxes_2d);
  cast_preset_tile<C, true, C::kIsBlock2d, false>(col, whole[1], shared,
                                                  tile_of_matrix<true>(col, tile), amaxes_2d);
}

template <class C>
void launch(const QuantizeArgs& args, const Execution& execution) {
  const Tiles tiles = tiles_of(args.x);
  const auto kernel = quantize_fp32_tile<C>;
  constexpr std::size_t kBytes = SharedTile<float>::kBytes;
  allow_shared(kernel, kBytes, "quantize");
  kernel<<<tile_grid(args.batch, tiles, "quantize"), kThreads, kBytes, cuda_stream(execution)>>>(
      args.x, args.row, args.col, tiles);
  check_launch("quantize");
}

}  // namespace

LaunchCast find_preset_fp32_tiles(const QuantizeArgs& args) {
  if (args.is_bf16 || !args.rowwise) return nullptr;
  return find_preset<kFp32TilesWalk>(args,
                                     []<class C, class>() -> LaunchCast { return launch<C>; });
}

}  // namespace minifloat::cuda
