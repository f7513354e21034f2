// The preset casts of matrices by tiles: columnwise, and both directions from one read.
#include "cuda/quantize/preset_tile.cuh"

namespace minifloat::cuda {
namespace {

template <class Row, class Col>
__global__ void __launch_bounds__(kThreads, std::min(kBlocksOf<Row>, kBlocksOf<Col>))
    quantize_whole_tile(const __grid_constant__ Source x, const __grid_constant__ KernelOperand row,
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
    if (threadIdx.x == 0) prepare<Row>(row, whole[0], tile.batch, is_first);
  if constexpr (kCol)
    if (threadIdx.x == 32) prepare<Col>(col, whole[1], tile.batch, is_first);
  shared.wait();
  if constexpr (kRow)
    cast_preset_tile<Row, false, false, false>(row, whole[0], shared,
                                               tile_of_matrix<false>(row, tile), amaxes_2d);
  if constexpr (kCol) {
    constexpr bool kHasAmaxes = kHasBlocks2d<Row> && kHasBlocks2d<Col>;
    cast_preset_tile<Col, true, kHasAmaxes, false>(col, whole[1], shared,
                                                   tile_of_matrix<true>(col, tile), amaxes_2d);
  }
}

template <class Row, class Col>
void launch_whole_tiles(const QuantizeArgs& args, const Execution& execution) {
  const Tiles tiles = tiles_of(args.x);
  quantize_whole_tile<Row, Col>
      <<<tile_grid(args.batch, tiles, "quantize"), kThreads, SharedTile<Bf16>::kBytes,
         cuda_stream(execution)>>>(args.x, args.row, args.col, tiles);
  check_launch("quantize");
}

template <class C>
bool try_column(const QuantizeArgs& args, const Execution& execution) {
  if (!is_of<C>(args.col_spec)) return false;
  launch_whole_tiles<Absent, C>(args, execution);
  return true;
}
template <class Row, class Col = Row>
bool try_both(const QuantizeArgs& args, const Execution& execution) {
  if (!is_of<Row>(args.row_spec) || !is_of<Col>(args.col_spec)) return false;
  launch_whole_tiles<Row, Col>(args, execution);
  return true;
}

template <class Casts>
bool try_fp4_column(const QuantizeArgs& args, const Execution& execution) {
  if (try_column<typename Casts::Straight>(args, execution) ||
      try_column<typename Casts::Transformed>(args, execution) ||
      try_column<typename Casts::TransformedRandom>(args, execution))
    return true;
  if constexpr (Casts::kOffersBlocks2d) return try_column<typename Casts::Block2d>(args, execution);
  return false;
}
template <class Casts>
bool try_fp4_both(const QuantizeArgs& args, const Execution& execution) {
  if (try_both<typename Casts::Straight>(args, execution) ||
      try_both<typename Casts::Straight, typename Casts::Transformed>(args, execution) ||
      try_both<typename Casts::Random, typename Casts::TransformedRandom>(args, execution) ||
      try_both<typename Casts::TransformedRandom>(args, execution))
    return true;
  if constexpr (Casts::kOffersBlocks2d) return try_both<typename Casts::Block2d>(args, execution);
  return false;
}

// The casts of the preset nvfp4_pow2, of which some directions are written as FP8: x forward, g
// backward.
bool launch_column_as_fp8(const QuantizeArgs& args, const Execution& execution) {
  using namespace preset;
  return try_column<AsFp8<Nvfp4Pow2::TransformedRandom>>(args, execution);
}
bool launch_both_as_fp8(const QuantizeArgs& args, const Execution& execution) {
  using namespace preset;
  using Straight = AsFp8<Nvfp4Pow2::Straight>;
  if (!args.row.row_scale) return false;
  if (args.col.row_scale)
    return try_both<AsFp8<Nvfp4Pow2::Random>, AsFp8<Nvfp4Pow2::TransformedRandom>>(args, execution);
  return try_both<Straight, Nvfp4Pow2::Transformed>(args, execution) ||
         try_both<Straight, Nvfp4Pow2::Straight>(args, execution);
}

bool launch_column(const QuantizeArgs& args, const Execution& execution) {
  using namespace preset;
  return try_column<Nearest<kTensor, E4M3>>(args, execution) ||
         try_column<Nearest<kTensor, E5M2>>(args, execution) ||
         try_column<Nearest<kRow, E4M3>>(args, execution) ||
         try_column<Nearest<kBlock, E4M3>>(args, execution) ||
         try_column<Block2d<kBlock, E4M3>>(args, execution) || try_column<Mxfp8>(args, execution) ||
         try_column<Mxfp8Block2d>(args, execution) || try_fp4_column<Mxfp4>(args, execution) ||
         try_fp4_column<Nvfp4>(args, execution) || try_fp4_column<Nvfp4Pow2>(args, execution);
}
bool launch_row_and_column(const QuantizeArgs& args, const Execution& execution) {
  using namespace preset;
  return try_both<Nearest<kTensor, E4M3>>(args, execution) ||
         try_both<Nearest<kTensor, E5M2>>(args, execution) ||
         try_both<Nearest<kRow, E4M3>>(args, execution) ||
         try_both<Nearest<kBlock, E4M3>>(args, execution) ||
         try_both<Block2d<kBlock, E4M3>>(args, execution) || try_both<Mxfp8>(args, execution) ||
         try_both<Mxfp8Block2d>(args, execution) || try_fp4_both<Mxfp4>(args, execution) ||
         try_fp4_both<Nvfp4>(args, execution) || try_fp4_both<Nvfp4Pow2>(args, execution);
}

}  // namespace

bool launch_tiles_as_fp8(const QuantizeArgs& args, bool rowwise, const Execution& execution) {
  return rowwise ? launch_both_as_fp8(args, execution) : launch_column_as_fp8(args, execution);
}

bool launch_preset_tiles(const QuantizeArgs& args, bool rowwise, const Execution& execution) {
  return rowwise ? launch_row_and_column(args, execution) : launch_column(args, execution);
}

}  // namespace minifloat::cuda
