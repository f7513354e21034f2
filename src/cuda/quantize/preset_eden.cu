// The preset casts of MS-EDEN (core/eden.h), of bf16: rowwise, matrices without gaps of whole
// transforms; columnwise, whole tiles. 4 lanes hold a transform, two blocks each: its strides up to
// 16 are within a lane, 32 and 64 between two.
//
//     lane of 4        0         1         2         3
//     blocks         0 1       2 3       4 5       6 7
//     scales' bits   word 0    word 1    word 2    word 3     of one Philox call, a half a block
//     sums           i and i + 4: lanes 2 apart; i and i + 2: 1 apart; i and i + 1: of one lane
//
// Instructions limit it, not memory.
#include "cuda/quantize/preset_run.cuh"

namespace minifloat::cuda {
namespace {

using Eden = PresetCast<ScaleRule::kNvfp4, E2M1, false, true, false, ScaleRounding::kEden>;
constexpr unsigned kLanes = 4;         // of a transform
constexpr unsigned kBlocksOfLane = 2;  // neighbours
constexpr unsigned kPairsOfRows = 4;   // of blocks, that a thread casts one after the other
constexpr unsigned kPairsOfTile = 2;
static_assert(kLanes * kBlocksOfLane == kEdenBlocks);

// ---- Two blocks ---------------------------------------------------------------------------------
// The random bits of the thread's pairs of blocks: lane i of 4 draws those of pair i, for all 4.
struct Draws {
  RandomBits drawn;
  // Returns the word of the lane's two scales. Takes part in an exchange of all lanes.
  __device__ __forceinline__ std::uint32_t of_pair(unsigned pair) const {
    std::uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      w[i] = __shfl_sync(kAllLanes, drawn.w[i], static_cast<int>(pair), kLanes);
    const std::uint32_t low = threadIdx.x & 1 ? w[1] : w[0], high = threadIdx.x & 1 ? w[3] : w[2];
    return threadIdx.x & 2 ? high : low;
  }
};

// Transforms 32 columns that have their signs. Takes part in an exchange of all lanes.
template <class Elements>
__device__ __forceinline__ void transform_blocks(const Elements (&x)[kBlocksOfLane],
                                                 Vec16<Bf16> (&y)[kBlocksOfLane]) {
  float v[kBlocksOfLane][kVec];
#pragma unroll
  for (unsigned b = 0; b < kBlocksOfLane; ++b) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[b][i] = x[b][i];
    butterflies<kVec>(v[b]);
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const float first = v[0][i], second = v[1][i];
    v[0][i] = first + second;
    v[1][i] = first - second;
  }
#pragma unroll
  for (int lanes = 1; lanes < static_cast<int>(kLanes); lanes *= 2) {
#pragma unroll
    for (unsigned b = 0; b < kBlocksOfLane; ++b) add_lanes(v[b], lanes);
  }
#pragma unroll
  for (unsigned b = 0; b < kBlocksOfLane; ++b) y[b] = round_vec(v[b], hadamard_norm(kEdenPoints));
}

// Two blocks, cast.
struct CastBlocks {
  Codes<E2M1> codes[kBlocksOfLane];
  BlockScale scales[kBlocksOfLane];
};

// Casts 32 columns that have their signs. Takes part in an exchange of all lanes.   bits: the word
// of their scales
template <class Elements>
__device__ __forceinline__ CastBlocks cast_blocks(const MatrixScale& matrix,
                                                  const Elements (&x)[kBlocksOfLane],
                                                  std::uint32_t bits) {
  Vec16<Bf16> y[kBlocksOfLane];
  transform_blocks(x, y);
  CastBlocks out;
  EdenSums sums[kBlocksOfLane];
#pragma unroll
  for (unsigned b = 0; b < kBlocksOfLane; ++b) {
    out.scales[b] = block_scale<E2M1>(Eden::kRule, Eden::kRounding, matrix, y[b].amax());
    const EdenCodes codes = eden_codes(out.scales[b], y[b]);
    out.codes[b] = codes.codes;
    sums[b] = weighted(codes.sums, out.scales[b].scale);
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) sums[b] = add_of_lane(sums[b], lanes);
  }
  const float correction = eden_correction(add(sums[0], sums[1]));
  store_corrected(out.scales[0], correction, {bits << 16}, out.codes[0]);
  store_corrected(out.scales[1], correction, {bits & 0xFFFF'0000u}, out.codes[1]);
  return out;
}

// Stores two blocks.   to: the first one's codes; scale, at: its index among scales, and among all
// vec16s
__device__ __forceinline__ void store_blocks(const KernelOperand& plan, const CastBlocks& blocks,
                                             std::uint8_t* to, std::uint64_t scale,
                                             std::uint64_t at) {
#pragma unroll
  for (unsigned b = 0; b < kBlocksOfLane; ++b) {
    store_scale_at(plan, Eden::kRule, blocks.scales[b], scale + b);
    store_encoded(plan, blocks.codes[b], blocks.scales[b], to + b * Eden::kCodeBytes, at + b);
  }
}

// ---- By rows ------------------------------------------------------------------------------------
// Loads the pair of vec16s that begins with vec16 u.
__device__ __forceinline__ void load_pair(const VecRun& run, std::uint32_t u,
                                          Vec16<Bf16> (&x)[kBlocksOfLane]) {
#pragma unroll
  for (unsigned b = 0; b < kBlocksOfLane; ++b) x[b] = load_vec(run, u + b);
}

__global__ void __launch_bounds__(kThreads, 3)
    cast_eden_rows(const __grid_constant__ VecRun run, const __grid_constant__ KernelOperand plan) {
  __shared__ Whole whole;
  constexpr std::uint32_t kStep = kThreads * kBlocksOfLane;
  const std::uint32_t first = blockIdx.x * (kStep * kPairsOfRows) + threadIdx.x * kBlocksOfLane;
  Vec16<Bf16> next[kBlocksOfLane];
  load_pair(run, first, next);
  if (threadIdx.x == 0) prepare<Eden>(plan, whole, 0, blockIdx.x == 0);
  __syncthreads();
  const MatrixScale matrix = whole.scale;
  const unsigned lane = threadIdx.x % kLanes;
  std::uint32_t flips[kBlocksOfLane];
#pragma unroll
  for (unsigned b = 0; b < kBlocksOfLane; ++b)
    flips[b] = by_pairs(whole.signs.w[lane] >> (b * kVec) & 0xFFFFu);
  const std::uint32_t drawn_for = first + lane % kPairsOfRows * kStep;
  const std::uint32_t row = run.vecs_of_row.divide(drawn_for);
  const Draws draws = {
      random_bits_at(whole, row, (drawn_for - row * run.vecs_of_row.d) / kEdenBlocks)};
#pragma unroll 1
  for (unsigned i = 0; i < kPairsOfRows; ++i) {
    Vec16<Bf16> x[kBlocksOfLane] = {next[0], next[1]};
    const std::uint32_t u = first + i * kStep;
    if (i + 1 < kPairsOfRows) load_pair(run, u + kStep, next);
#pragma unroll
    for (unsigned b = 0; b < kBlocksOfLane; ++b) flip_by_pairs(x[b], flips[b]);
    const CastBlocks blocks = cast_blocks(matrix, x, draws.of_pair(i));
    if (u < run.count)
      store_blocks(plan, blocks, plan.codes + std::uint64_t{u} * Eden::kCodeBytes, u, u);
  }
}

// ---- By tiles -----------------------------------------------------------------------------------
// 4 lanes hold a pair of columns of x, whose two rows of the operand are cast one after the other.
__global__ void __launch_bounds__(kThreads, 3)
    cast_eden_tile(const __grid_constant__ Source x, const __grid_constant__ KernelOperand plan,
                   const __grid_constant__ Tiles tiles) {
  static_assert(kThreads / kLanes == kTile / kPairsOfTile);
  extern __shared__ __align__(16) std::uint32_t words[];
  __shared__ Whole whole;
  const TilePlace tile = tile_place(tiles);
  const SharedTile<Bf16> shared = {words};
  shared.fill<true>(x, tile);
  if (threadIdx.x == 0) prepare<Eden>(plan, whole, tile.batch, tile.row == 0 && tile.col == 0);
  shared.wait();
  shared.flip_rows(whole.signs);

  const unsigned lane = threadIdx.x % kLanes, pair = threadIdx.x / kLanes;
  const std::uint32_t line = tile.batch * plan.rows + tile.col + kPairsOfTile * pair;
  const std::uint32_t col = tile.row / kVec + kBlocksOfLane * lane;  // in vec16s
  const Draws draws = {random_bits_at(whole, line + lane % kPairsOfTile, tile.row / kEdenPoints)};
  std::uint32_t both[kBlocksOfLane][kVec];
#pragma unroll
  for (unsigned b = 0; b < kBlocksOfLane; ++b) {
    const std::uint32_t* from = shared.word_of_vec(kBlocksOfLane * lane + b, pair);
#pragma unroll
    for (unsigned j = 0; j < kVec; ++j) both[b][j] = from[j * SharedTile<Bf16>::kWords];
  }
  const auto cast = [&](const auto& values, unsigned i) {
    const CastBlocks blocks = cast_blocks(whole.scale, values, draws.of_pair(i));
    const std::uint64_t row = line + i;
    store_blocks(plan, blocks, plan.codes + row * plan.code_pitch + col * Eden::kCodeBytes,
                 row * plan.scale_cols + col, row * (plan.padded / kVec) + col);
  };
  const ColumnOfPairs<false> lower[kBlocksOfLane] = {{both[0]}, {both[1]}};
  cast(lower, 0);
  const ColumnOfPairs<true> upper[kBlocksOfLane] = {{both[0]}, {both[1]}};
  cast(upper, 1);
}

}  // namespace

bool launch_preset_eden(const QuantizeArgs& args, bool columnwise, const Execution& execution) {
  if (!(columnwise ? args.col_spec : args.row_spec).is_eden()) return false;
  if (columnwise) {
    const Tiles tiles = tiles_of(args.x);
    cast_eden_tile<<<tile_grid(args.batch, tiles, "quantize"), kThreads, SharedTile<Bf16>::kBytes,
                     cuda_stream(execution)>>>(args.x, args.col, tiles);
  } else {
    if (!is_run(args) || args.batch > 1) return false;
    const VecRun run = run_of(args);
    constexpr std::int64_t kOfBlock = kThreads * kBlocksOfLane * kPairsOfRows;
    const unsigned grid = grid_of(ceil_div<std::int64_t>(run.count, kOfBlock), "quantize");
    cast_eden_rows<<<grid, kThreads, 0, cuda_stream(execution)>>>(run, args.row);
  }
  check_launch("quantize");
  return true;
}

}  // namespace minifloat::cuda
