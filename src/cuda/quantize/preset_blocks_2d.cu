// NVFP4 with 2D blocks in both directions, which have the same scales and the same codes,
// transposed. The codes are computed once, and transposed in shared memory, 8 x 8 codes a thread.
//
//     a warp      16 rows of the tile, the height of a block, and its 8 vec16 columns
//     a thread    4 rows of a vec16 column: a block is the vec16s of 4 lanes, 8 apart
//
// Under a rule that reads values the lanes of a block sum its errors first.
//
//     bytes an element: 2 of x, 1/2 of codes twice, 1/256 of scales twice
#include "cuda/common/nibbles.cuh"
#include "cuda/quantize/preset_table.cuh"

namespace minifloat::cuda {
namespace {

inline constexpr unsigned kCodeWords = kTile / 8;  // of a row of the tile
inline constexpr unsigned kRowsOfThread = 4;
static_assert(kThreads / kVecColumns * kRowsOfThread == kTile);

// Returns the place of word `word` of row `r` of a tile's codes. Rows 4 and 8 apart lie in
// different banks.
__device__ __forceinline__ unsigned code_place(unsigned r, unsigned word) {
  const unsigned slot = r ^ (((r >> 2) ^ (r >> 3)) & 1);
  return slot * kCodeWords + (word ^ (r / 8));
}

// Adds a block's four lanes: rows r and r + 8, then r and r + 4.
__device__ __forceinline__ Errors add_lanes(Errors of_lane) {
#pragma unroll
  for (unsigned lanes = 2 * kVecColumns; lanes >= kVecColumns; lanes /= 2) {
    of_lane.first = of_lane.first + __shfl_xor_sync(kAllLanes, of_lane.first, lanes);
    of_lane.second = of_lane.second + __shfl_xor_sync(kAllLanes, of_lane.second, lanes);
  }
  return of_lane;
}
__device__ __forceinline__ Errors operator+(const Errors& a, const Errors& b) {
  return {a.first + b.first, a.second + b.second};
}

// Chooses between the block's two scales, by the whole warp: by the bound, or, where that is not
// sure of one of the warp's blocks, by the errors.   vec_of: returns row i of the thread's vec16s
template <class VecOf>
__device__ __forceinline__ BlockScale choose_scale(const MatrixScale& matrix,
                                                   const BlockScales& scales, std::uint32_t amax,
                                                   const VecOf& vec_of) {
  Errors distances = {0.0f, 0.0f};
#pragma unroll
  for (unsigned i = 0; i < kRowsOfThread; ++i)
    distances = distances + distances_of_vec(scales, vec_of(i));
  distances = add_lanes(distances);
  Decision decision = {amax == 0 || !is_finite(amax), false};  // the errors are 0, or NaN
  if (!decision.is_sure && takes_bound(scales, amax))
    decision = decide_by_bound<16>(matrix, scales, bit_cast<float>(amax), distances);
  if (__any_sync(kAllLanes, !decision.is_sure)) {
    // The order of core/scale_rule.h's add_rows: the lanes, rows i and i + 2, then i and i + 1.
    Errors errors = {0.0f, 0.0f};
#pragma unroll 1
    for (unsigned i = 0; i < 2; ++i)
      errors = errors + (add_lanes(errors_of_vec(matrix, scales, vec_of(i))) +
                         add_lanes(errors_of_vec(matrix, scales, vec_of(i + 2))));
    if (!decision.is_sure) decision.takes_second = takes_second(errors.first, errors.second);
  }
  return decision.takes_second ? scales.second : scales.first;
}

// A block, and the first of its rows that the lane stores the scales of where they are swizzled.
struct BlockPlace {
  std::uint32_t batch, row, col, of_lane;
};
// Stores the scale of a block: once, or swizzled for each row of it.
__device__ __forceinline__ void store_scales(const KernelOperand& plan, const BlockScale& block,
                                             const BlockPlace& at) {
  if (plan.swizzled) {
    const std::uint32_t line = at.batch * plan.rows + at.row * kVec + at.of_lane;
#pragma unroll 1
    for (std::uint32_t i = 0; i < kRowsOfThread; ++i)
      store_scale_at(plan, ScaleRule::kNvfp4, block,
                     swizzled_index(line + i, at.col, plan.scale_cols));
  } else if (at.of_lane == 0) {
    store_scale_at(plan, ScaleRule::kNvfp4, block,
                   (std::uint64_t{at.batch} * plan.scale_rows + at.row) * plan.scale_cols + at.col);
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads, 4)
    quantize_whole_blocks_2d(const __grid_constant__ KernelInput x,
                             const __grid_constant__ KernelOperand row,
                             const __grid_constant__ KernelOperand col,
                             const __grid_constant__ Tiles tiles) {
  static_assert(C::kIsBlock2d && C::kHeightLog2 == 4 && C::kVecsLog2 == 0);
  extern __shared__ __align__(16) std::uint32_t words[];
  __shared__ std::uint32_t codes[kTile * kCodeWords];
  __shared__ Whole whole;
  const TilePlace tile = tile_place(tiles);
  const SharedTile<Bf16> shared = {words};
  shared.fill<true>(x, tile);
  if (threadIdx.x == 0) {
    const bool is_first = tile.row == 0 && tile.col == 0;
    prepare<C>(row, whole, tile.batch, is_first);
    if (is_first && col.amax) store_whole<E2M1>(col, tile.batch, col.amax[tile.batch]);
  }
  shared.wait();

  // ---- The block's amax and scale
  const unsigned vec_col = threadIdx.x % kVecColumns;
  const unsigned tile_row = threadIdx.x / kVecColumns * kRowsOfThread;
  Vec16<Bf16> vecs[kRowsOfThread];
  std::uint32_t amax = 0;
#pragma unroll
  for (unsigned i = 0; i < kRowsOfThread; ++i) {
    vecs[i] = shared.vec_at(tile_row + i, vec_col);
    amax = max(amax, vecs[i].amax());
  }
  amax = max(amax, __shfl_xor_sync(kAllLanes, amax, kVecColumns));
  amax = max(amax, __shfl_xor_sync(kAllLanes, amax, 2 * kVecColumns));
  // A rule that reads values leaves no registers for them: they are read again each time.
  const auto vec_of = [&](unsigned i) -> Vec16<Bf16> {
    if constexpr (C::kReadsValues)
      return shared.vec_at(tile_row + i, vec_col);
    else
      return vecs[i];
  };
  BlockScale block;
  if constexpr (C::kReadsValues)
    block = choose_scale(whole.scale, both_scales(C::kRule, C::kRounding, whole.scale, amax), amax,
                         vec_of);
  else
    block = block_scale<E2M1>(C::kRule, C::kRounding, whole.scale, amax);
  const std::uint32_t block_row = tile.row / kVec + threadIdx.x / 32,
                      block_col = tile.col / kVec + vec_col;
  const std::uint32_t of_lane = threadIdx.x % 32 / kVecColumns * kRowsOfThread;  // of the block
  store_scales(row, block, {tile.batch, block_row, block_col, of_lane});
  store_scales(col, block, {tile.batch, block_col, block_row, of_lane});

  // ---- Rowwise
  const std::uint64_t first = std::uint64_t{tile.batch} * row.rows + tile.row + tile_row;
  std::uint8_t* to = row.codes + first * row.code_pitch + block_col * kVecBytes<E2M1>;
#pragma unroll
  for (unsigned i = 0; i < kRowsOfThread; ++i, to += row.code_pitch) {
    const Codes<E2M1> both = encode_in_block<E2M1, false>(row, C::kRule, vec_of(i), block, {});
    store_vec<E2M1>(to, 0, both);
    codes[code_place(tile_row + i, 2 * vec_col)] = both.w[0];
    codes[code_place(tile_row + i, 2 * vec_col + 1)] = both.w[1];
  }
  __syncthreads();

  // ---- Columnwise
  const unsigned rows_of_8 = threadIdx.x % kCodeWords, word = threadIdx.x / kCodeWords;
  std::uint32_t a[8];
#pragma unroll
  for (unsigned i = 0; i < 8; ++i) a[i] = codes[code_place(rows_of_8 * 8 + i, word)];
  transpose_8x8(a);
  const std::uint64_t line = std::uint64_t{tile.batch} * col.rows + tile.col + word * 8;
  to = col.codes + line * col.code_pitch + tile.row / 2 + rows_of_8 * 4;
#pragma unroll
  for (int i = 0; i < 8; ++i, to += col.code_pitch) *reinterpret_cast<std::uint32_t*>(to) = a[i];
}

template <class C>
void launch(const QuantizeArgs& args, const Execution& execution) {
  const Tiles tiles = tiles_of(args.x);
  quantize_whole_blocks_2d<C>
      <<<tile_grid(args.batch, tiles, "quantize"), kThreads, SharedTile<Bf16>::kBytes,
         cuda_stream(execution)>>>(args.x, args.row, args.col, tiles);
  check_launch("quantize");
}

}  // namespace

// Both directions scale by one amax: that which the caller passed for both, or the current one,
// which is then the same.
LaunchCast find_blocks_2d(const QuantizeArgs& args) {
  if (!args.is_bf16 || !args.rowwise || args.row_spec != args.col_spec || args.row.decoded ||
      args.col.decoded || args.row.amax != args.col.amax)
    return nullptr;
  return find_preset<kBlocks2dWalk>(args,
                                    [&]<class C, class>() -> LaunchCast { return launch<C>; });
}

}  // namespace minifloat::cuda
