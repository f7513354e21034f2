// The preset casts of MS-EDEN (core/eden.h), of bf16: rowwise, matrices without gaps of whole
// transforms; columnwise, whole tiles. 4 lanes hold a transform, two blocks each: its strides up to
// 16 are within a lane, 32 and 64 between two.
//
//     lane of 4        0         1         2         3
//     blocks         0 1       2 3       4 5       6 7
//     scales' bits   word 0    word 1    word 2    word 3     of one Philox call, a half a block
//     sums           i and i + 4: lanes 2 apart; i and i + 2: 1 apart; i and i + 1: of one lane
//
// Instructions limit it, not memory. A kernel has one copy of a transform's cast, in a loop.
#include "cuda/quantize/preset_run.cuh"

namespace minifloat::cuda {
namespace {

using Eden = PresetCast<ScaleRule::kNvfp4, E2M1, false, true, false, ScaleRounding::kEden>;
constexpr unsigned kLanes = 4;                                 // of a transform
constexpr unsigned kBlocksOfLane = 2;                          // neighbours
constexpr unsigned kOfThreadByRows = 4, kOfThreadByTiles = 2;  // transforms, one after the other
static_assert(kLanes * kBlocksOfLane == kEdenBlocks);

// ---- Two blocks ---------------------------------------------------------------------------------
// The random bits of the transforms that a thread casts: lane i of 4 draws those of transform i,
// modulo their number, for all 4.
struct Draws {
  RandomBits drawn;
  // Returns the word of the lane's two scales. Takes part in an exchange of all lanes.
  __device__ __forceinline__ std::uint32_t of_transform(unsigned i) const {
    std::uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      w[j] = __shfl_sync(kAllLanes, drawn.w[j], static_cast<int>(i), kLanes);
    const std::uint32_t low = threadIdx.x & 1 ? w[1] : w[0], high = threadIdx.x & 1 ? w[3] : w[2];
    return threadIdx.x & 2 ? high : low;
  }
};

// Transforms 32 columns that have their signs. Takes part in an exchange of all lanes.   first,
// second: the lane's blocks, of any types with 16 elements
template <class First, class Second>
__device__ __forceinline__ void transform_blocks(const First& first, const Second& second,
                                                 Vec16<Bf16> (&y)[kBlocksOfLane]) {
  float v[kBlocksOfLane][kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) v[0][i] = first[i], v[1][i] = second[i];
#pragma unroll
  for (unsigned b = 0; b < kBlocksOfLane; ++b) butterflies<kVec>(v[b]);
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const float low = v[0][i], high = v[1][i];
    v[0][i] = low + high;
    v[1][i] = low - high;
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
template <class First, class Second>
__device__ __forceinline__ CastBlocks cast_blocks(const MatrixScale& matrix, const First& first,
                                                  const Second& second, std::uint32_t bits) {
  Vec16<Bf16> y[kBlocksOfLane];
  transform_blocks(first, second, y);
  CastBlocks out;
#pragma unroll
  for (unsigned b = 0; b < kBlocksOfLane; ++b)
    out.scales[b] = DeviceEquations::nvfp4_without_factor(Eden::kRounding, matrix, y[b].amax());
  EdenSums sums[kBlocksOfLane];
  const auto encode = [&]<bool kFast>() {
#pragma unroll
    for (unsigned b = 0; b < kBlocksOfLane; ++b) {
      DeviceEquations::add_factor(out.scales[b], matrix, kFast);
      const EdenCodes codes = kFast ? eden_codes_by_fast_path(out.scales[b], y[b])
                                    : eden_codes_of_any(out.scales[b], y[b]);
      out.codes[b] = codes.codes;
      sums[b] = codes.sums;
    }
  };
  // One branch for both: their sums, which are chains of additions, overlap.
  if (out.scales[0].takes_fast_path && out.scales[1].takes_fast_path)
    encode.template operator()<true>();
  else
    encode.template operator()<false>();
#pragma unroll
  for (unsigned b = 0; b < kBlocksOfLane; ++b) {
    sums[b] = weighted(sums[b], out.scales[b].scale);
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) sums[b] = add_of_lane(sums[b], lanes);
  }
  const float correction = eden_correction(add(sums[0], sums[1]));
  store_corrected(out.scales[0], correction, {bits << 16}, out.codes[0]);
  store_corrected(out.scales[1], correction, {bits & 0xFFFF'0000u}, out.codes[1]);
  return out;
}

// Stores two blocks at once.   to: the first one's codes; scale, at: its index among scales, and
// among all vec16s
__device__ __forceinline__ void store_blocks(const KernelOperand& plan, const CastBlocks& blocks,
                                             std::uint8_t* to, std::uint64_t scale,
                                             std::uint64_t at) {
  static_cast<std::uint16_t*>(plan.scale)[scale / kBlocksOfLane] =
      static_cast<std::uint16_t>(blocks.scales[0].code | blocks.scales[1].code << 8);
  const auto& codes = blocks.codes;
  if (plan.codes)
    *reinterpret_cast<uint4*>(to) =
        make_uint4(codes[0].w[0], codes[0].w[1], codes[1].w[0], codes[1].w[1]);
  if (!plan.decoded) return;
#pragma unroll
  for (unsigned b = 0; b < kBlocksOfLane; ++b)
    store_product_values<E2M1>(codes[b], blocks.scales[b].scale, plan.decoded + (at + b) * kVec, 0,
                               kVec, true);
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
  const std::uint32_t first = blockIdx.x * (kStep * kOfThreadByRows) + threadIdx.x * kBlocksOfLane;
  Vec16<Bf16> next[kBlocksOfLane];
  load_pair(run, first, next);
  if (threadIdx.x == 0) prepare<Eden>(plan, whole, 0, blockIdx.x == 0);
  __syncthreads();
  const unsigned lane = threadIdx.x % kLanes;
  std::uint32_t flips[kBlocksOfLane];
#pragma unroll
  for (unsigned b = 0; b < kBlocksOfLane; ++b)
    flips[b] = by_pairs(whole.signs.w[lane] >> (b * kVec) & 0xFFFFu);
  const std::uint32_t drawn_for = first + lane % kOfThreadByRows * kStep;
  const std::uint32_t row = run.vecs_of_row.divide(drawn_for);
  const Draws draws = {
      random_bits_at(whole, row, (drawn_for - row * run.vecs_of_row.d) / kEdenBlocks)};
#pragma unroll 1
  for (unsigned i = 0; i < kOfThreadByRows; ++i) {
    Vec16<Bf16> x[kBlocksOfLane] = {next[0], next[1]};
    const std::uint32_t u = first + i * kStep;
    if (i + 1 < kOfThreadByRows) load_pair(run, u + kStep, next);
#pragma unroll
    for (unsigned b = 0; b < kBlocksOfLane; ++b) {
      hide_origin(flips[b]);
      flip_by_pairs(x[b], flips[b]);
    }
    const CastBlocks blocks = cast_blocks(whole.scale, x[0], x[1], draws.of_transform(i));
    if (u >= run.count) continue;
    std::uint64_t scale = u;
    if (plan.swizzled) {
      const std::uint32_t row_of_u = run.vecs_of_row.divide(u);
      scale = swizzled_index(row_of_u, u - row_of_u * run.vecs_of_row.d, plan.scale_cols);
    }
    store_blocks(plan, blocks, plan.codes + std::uint64_t{u} * Eden::kCodeBytes, scale, u);
  }
}

// ---- By tiles -----------------------------------------------------------------------------------
// A warp casts 8 columns of x at a time, a 16-byte chunk of the tile's rows. It reads them as
// matrices of 8 x 8, of these columns and of 8 rows that lie 16 apart, transposed:
//
//     matrix i         rows i, i + 16, ..., i + 112
//     lane l of 4      rows 32 l + i and 32 l + i + 16, the halves of word i: element i of its two
//                      blocks
__device__ __forceinline__ void load_column(const SharedTile<Bf16>& tile, unsigned chunk,
                                            std::uint32_t (&both)[kVec]) {
  constexpr unsigned kAtOnce = 4;  // matrices, of whose rows a lane passes one
  const unsigned lane = threadIdx.x % 32;
  const std::uint32_t* from = tile.chunk_at(lane % 8 * kVec + lane / 8, chunk);
#pragma unroll
  for (unsigned i = 0; i < kVec; i += kAtOnce)
    load_transposed_8x8(from + i * SharedTile<Bf16>::kWords, both + i);
}

__global__ void __launch_bounds__(kThreads, 4)
    cast_eden_tile(const __grid_constant__ KernelInput x,
                   const __grid_constant__ KernelOperand plan,
                   const __grid_constant__ Tiles tiles) {
  constexpr unsigned kColumns = 32 / kLanes;  // of a chunk
  constexpr unsigned kStep = kThreads / kLanes;
  static_assert(kColumns == SharedTile<Bf16>::kChunk && kStep * kOfThreadByTiles == kTile);
  extern __shared__ __align__(16) std::uint32_t words[];
  __shared__ Whole whole;
  const TilePlace tile = tile_place(tiles);
  const SharedTile<Bf16> shared = {words};
  shared.fill<true>(x, tile);
  if (threadIdx.x == 0) prepare<Eden>(plan, whole, tile.batch, tile.row == 0 && tile.col == 0);
  shared.wait();

  const unsigned lane = threadIdx.x % kLanes, column = threadIdx.x / kLanes;
  const std::uint32_t signs = whole.signs.w[lane];
  const std::uint32_t line = tile.batch * plan.rows + tile.col + column;
  const std::uint32_t col = tile.row / kVec + kBlocksOfLane * lane;  // in vec16s
  const Draws draws = {
      random_bits_at(whole, line + lane % kOfThreadByTiles * kStep, tile.row / kEdenPoints)};
#pragma unroll 1
  for (unsigned i = 0; i < kOfThreadByTiles; ++i) {
    std::uint32_t both[kVec];
    load_column(shared, (column + i * kStep) / kColumns, both);
#pragma unroll
    for (int j = 0; j < kVec; ++j) both[j] ^= (signs << (kVec - 1 - j)) & 0x8000'8000u;
    const CastBlocks blocks = cast_blocks(whole.scale, ColumnOfPairs<false>{both},
                                          ColumnOfPairs<true>{both}, draws.of_transform(i));
    const std::uint64_t row = line + i * kStep;
    store_blocks(plan, blocks, plan.codes + row * plan.code_pitch + col * Eden::kCodeBytes,
                 plan.swizzled ? swizzled_index(line + i * kStep, col, plan.scale_cols)
                               : row * plan.scale_cols + col,
                 row * (plan.padded / kVec) + col);
  }
}

void launch_eden_rows(const QuantizeArgs& args, const Execution& execution) {
  const VecRun run = run_of(args);
  constexpr std::int64_t kOfBlock = kThreads * kBlocksOfLane * kOfThreadByRows;
  const unsigned grid = grid_of(ceil_div<std::int64_t>(run.count, kOfBlock), "quantize");
  cast_eden_rows<<<grid, kThreads, 0, cuda_stream(execution)>>>(run, args.row);
  check_launch("quantize");
}
void launch_eden_tiles(const QuantizeArgs& args, const Execution& execution) {
  const Tiles tiles = tiles_of(args.x);
  cast_eden_tile<<<tile_grid(args.batch, tiles, "quantize"), kThreads, SharedTile<Bf16>::kBytes,
                   cuda_stream(execution)>>>(args.x, args.col, tiles);
  check_launch("quantize");
}

}  // namespace

LaunchCast find_preset_eden(const QuantizeArgs& args) {
  const bool is_one = args.rowwise != args.columnwise;
  if (!is_one || !args.is_bf16 || args.groups) return nullptr;
  if (!(args.columnwise ? args.col_spec : args.row_spec).is_eden()) return nullptr;
  const KernelOperand& plan = args.columnwise ? args.col : args.row;
  if (reinterpret_cast<std::uintptr_t>(plan.codes) % sizeof(uint4) != 0 ||
      reinterpret_cast<std::uintptr_t>(plan.scale) % kBlocksOfLane != 0)
    return nullptr;
  if (args.columnwise) return launch_eden_tiles;
  return is_run(args) && args.batch == 1 ? launch_eden_rows : nullptr;
}

}  // namespace minifloat::cuda
