// The preset casts by tiles: columnwise, and both directions from one read.
#include <algorithm>

#include "cuda/quantize/preset.cuh"

namespace minifloat::cuda {
namespace {

// Casts one direction of a tile.   kHasAmaxes: `amaxes_2d` holds the amaxes of the 2D blocks,
// computed by the other direction
template <class C, bool kTransposed, bool kHasAmaxes>
__device__ __forceinline__ void cast_whole_tile(const KernelOperand& plan, const Whole& whole,
                                                const SharedTile<Bf16>& shared,
                                                const TilePlace& tile, std::uint32_t* amaxes_2d) {
  std::uint32_t largest = 0;
  using F = typename C::F;
  if constexpr (C::kIsBlock2d && !kHasAmaxes)
    amax_of_blocks_2d<C, kTransposed>(plan, shared, amaxes_2d);
  const MatrixScale scale = scale_of_whole<C>(plan, whole);
  const std::uint32_t vec_col = threadIdx.x % kVecColumns;
  const std::uint32_t col = (kTransposed ? tile.row : tile.col) / kVec + vec_col;  // in vec16s
  const std::uint32_t first = kTransposed ? tile.col : tile.row;
  std::uint8_t* const codes =
      plan.codes + std::uint64_t{first} * plan.code_pitch + col * kVecBytes<F>;
  const bool is_first_col = col % (1 << C::kVecsLog2) == 0;  // of a block
  const std::uint64_t first_scale =
      std::uint64_t{first >> C::kHeightLog2} * plan.scale_cols + (col >> C::kVecsLog2);
  shared.template each_vec<kTransposed>([&](const auto& vec, unsigned tile_row) {
    const Transformed16 transformed = transform_preset<C>(vec);
    const std::uint32_t row = first + tile_row;
    std::uint32_t amax = 0;
    if constexpr (C::kIsBlock2d) {
      amax = amaxes_2d[block_2d_of(plan, tile_row, vec_col, kHasAmaxes)];
    } else if constexpr (C::kBlocks) {
      amax = amax_of_lanes(transformed.amax, C::kVecsLog2);
    } else if constexpr (C::kRule == ScaleRule::kRow) {
      const float active_amax = plan.amax[row];
      amax = magnitude_bits(active_amax);
      if (col == 0) store_whole<F>(plan, row, active_amax);
    }
    const BlockScale block = block_scale<F>(C::kRule, C::kRounding, scale, amax);
    if constexpr (C::kBlocks)
      if (is_first_col && tile_row % (1 << C::kHeightLog2) == 0)
        store_scale_at(plan, C::kRule, block,
                       first_scale + std::uint64_t{tile_row >> C::kHeightLog2} * plan.scale_cols);
    RandomBits bits = {};
    if constexpr (C::kStochastic) bits = random_bits_at(whole, row, col);
    encode_and_store<C>(plan, transformed, block, bits,
                        codes + std::uint64_t{tile_row} * plan.code_pitch,
                        std::uint64_t{row} * (plan.padded / kVec) + col);
    if constexpr (kFindsCurrentAmax<C>)
      if (plan.current_amax) largest = max(largest, transformed.vec.amax());
  });
  if constexpr (kFindsCurrentAmax<C>) raise_current_amax(plan, largest);
}

template <class C>
constexpr bool kHasBlocks2d = false;
template <class C>
  requires(C::kIsBlock2d)
constexpr bool kHasBlocks2d<C> = true;

// The minimum blocks per SM. Casts to 8 bits need fewer registers, and wait longer for memory.
template <class C>
constexpr int kBlocksOf = 5;  // also of an absent direction
template <class C>
  requires(C::F::kBits == 4)
constexpr int kBlocksOf<C> = 4;

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
  const SharedTile<Bf16> shared = {words};
  shared.fill<true>(x, tile);
  if constexpr (kRow)
    if (threadIdx.x == 0) prepare<Row>(row, whole[0]);
  if constexpr (kCol)
    if (threadIdx.x == 32) prepare<Col>(col, whole[1]);
  shared.wait();
  if constexpr (kRow) cast_whole_tile<Row, false, false>(row, whole[0], shared, tile, amaxes_2d);
  if constexpr (kCol) {
    constexpr bool kHasAmaxes = kHasBlocks2d<Row> && kHasBlocks2d<Col>;
    cast_whole_tile<Col, true, kHasAmaxes>(col, whole[1], shared, tile, amaxes_2d);
  }
}

template <class Row, class Col>
void launch_whole_tiles(const QuantizeArgs& args, const Execution& execution) {
  const Tiles tiles = tiles_of(args.x);
  quantize_whole_tile<Row, Col>
      <<<tile_grid(1, tiles, "quantize"), kThreads, SharedTile<Bf16>::kBytes,
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

bool launch_preset_tiles(const QuantizeArgs& args, bool rowwise, const Execution& execution) {
  return rowwise ? launch_row_and_column(args, execution) : launch_column(args, execution);
}

}  // namespace minifloat::cuda
