// The preset casts of matrices by tiles, of bf16 or fp32: columnwise, and both directions from one
// read.
//
//     bytes an element: 2 or 4 of x, 1 or 1/2 of codes a direction
#pragma once

#include "cuda/quantize/preset_table.cuh"
#include "cuda/quantize/preset_tile.cuh"

namespace minifloat::cuda {

// Tiles of fp32 take 64 KiB of shared memory.
template <class T, class Row, class Col>
constexpr int kBlocksOfTiles = sizeof(T) == 4 ? 3 : std::min(kBlocksOf<Row>, kBlocksOf<Col>);

template <class T, class Row, class Col>
__global__ void __launch_bounds__(kThreads, (kBlocksOfTiles<T, Row, Col>))
    quantize_matrix_tile(const __grid_constant__ KernelInput x,
                         const __grid_constant__ KernelOperand row,
                         const __grid_constant__ KernelOperand col,
                         const __grid_constant__ Tiles tiles) {
  constexpr bool kRow = !std::is_same_v<Row, Absent>, kCol = !std::is_same_v<Col, Absent>;
  constexpr bool kBoth = sizeof(T) == 4;  // both directions are always cast
  extern __shared__ __align__(16) std::uint32_t words[];
  __shared__ std::uint32_t amaxes_2d[kBlocks2d];
  __shared__ Whole whole[2];
  const TilePlace tile = tile_place(tiles);
  const bool is_first = tile.row == 0 && tile.col == 0;
  const SharedTile<T> shared = {words};
  shared.template fill<true>(x, tile);
  if constexpr (kRow)
    if (threadIdx.x == 0 && (kBoth || is_wanted(row)))
      prepare<Row>(row, whole[0], tile.batch, is_first);
  if constexpr (kCol)
    if (threadIdx.x == 32) prepare<Col>(col, whole[1], tile.batch, is_first);
  shared.wait();
  if constexpr (kRow)
    if (kBoth || is_wanted(row))
      cast_preset_tile<Row, false, false, false>(row, whole[0], shared,
                                                 tile_of_matrix<false>(row, tile), amaxes_2d);
  if constexpr (kCol) {
    constexpr bool kHasAmaxes = kHasBlocks2d<Row> && kHasBlocks2d<Col>;
    cast_preset_tile<Col, true, kHasAmaxes, false>(col, whole[1], shared,
                                                   tile_of_matrix<true>(col, tile), amaxes_2d);
  }
}

template <class T, class Row, class Col>
void launch_matrix_tiles(const QuantizeArgs& args, const Execution& execution) {
  const Tiles tiles = tiles_of(args.x);
  const auto kernel = quantize_matrix_tile<T, Row, Col>;
  constexpr std::size_t kBytes = SharedTile<T>::kBytes;
  allow_shared(kernel, kBytes, "quantize");
  kernel<<<tile_grid(args.batch, tiles, "quantize"), kThreads, kBytes, cuda_stream(execution)>>>(
      args.x, args.row, args.col, tiles);
  check_launch("quantize");
}

template <class T, unsigned kWalk>
LaunchCast find_matrix_tiles(const QuantizeArgs& args) {
  return find_preset<kWalk>(
      args, [&]<class Row, class Col>() -> LaunchCast { return launch_matrix_tiles<T, Row, Col>; });
}

}  // namespace minifloat::cuda
