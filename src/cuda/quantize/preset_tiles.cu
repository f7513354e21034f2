// The preset casts of matrices by tiles: columnwise, and both directions from one read.
#include "cuda/quantize/preset_table.cuh"
#include "cuda/quantize/preset_tile.cuh"

namespace minifloat::cuda {
namespace {

template <class Row, class Col>
__global__ void __launch_bounds__(kThreads, std::min(kBlocksOf<Row>, kBlocksOf<Col>))
    quantize_whole_tile(const __grid_constant__ KernelInput x,
                        const __grid_constant__ KernelOperand row,
                        const __grid_constant__ KernelOperand col,
                        const __grid_constant__ Tiles tiles) {
  constexpr bool kRow = !std::is_same_v<Row, Absent>, kCol = !std::is_same_v<Col, Absent>;
  extern __shared__ __align__(16) std::uint32_t words[];
  __shared__ std::uint32_t amaxes_2d[kBlocks2d];
  __shared__ Whole whole[2];
  const TilePlace tile = tile_place(tiles);
  const bool is_first = tile.row == 0 && tile.col == 0;
  const SharedTile<Bf16> shared = {words};
  shared.fill<true>(x, tile);
  if constexpr (kRow)
    if (threadIdx.x == 0 && is_wanted(row)) prepare<Row>(row, whole[0], tile.batch, is_first);
  if constexpr (kCol)
    if (threadIdx.x == 32) prepare<Col>(col, whole[1], tile.batch, is_first);
  shared.wait();
  if constexpr (kRow)
    if (is_wanted(row))
      cast_preset_tile<Row, false, false, false>(row, whole[0], shared,
                                                 tile_of_matrix<false>(row, tile), amaxes_2d);
  if constexpr (kCol) {
    constexpr bool kHasAmaxes = kHasBlocks2d<Row> && kHasBlocks2d<Col>;
    cast_preset_tile<Col, true, kHasAmaxes, false>(col, whole[1], shared,
                                                   tile_of_matrix<true>(col, tile), amaxes_2d);
  }
}

template <class Row, class Col>
void launch(const QuantizeArgs& args, const Execution& execution) {
  const Tiles tiles = tiles_of(args.x);
  quantize_whole_tile<Row, Col>
      <<<tile_grid(args.batch, tiles, "quantize"), kThreads, SharedTile<Bf16>::kBytes,
         cuda_stream(execution)>>>(args.x, args.row, args.col, tiles);
  check_launch("quantize");
}

}  // namespace

LaunchCast find_preset_tiles(const QuantizeArgs& args) {
  if (!args.is_bf16) return nullptr;
  return find_preset<kTilesWalk>(
      args, []<class Row, class Col>() -> LaunchCast { return launch<Row, Col>; });
}

}  // namespace minifloat::cuda
