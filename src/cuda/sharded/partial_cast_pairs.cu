// Partial casts of two directions from one read, or of one direction whose cells are one column
// wide. A block of threads takes 128 x 128 of the weight, a warp 16 rows, and a thread four patches
// of 4 x 4 below one another:
//
//                lane 0     lane 1     lane 2     lane 3     lane 4   ...   lane 31
//     rows 0-3   p p p p    p p p p    p p p p    p p p p
//     rows 4-7   p p p p    ...                            a warp reads 512 bytes of each of 4 rows
//
//     amax    cells of one row: lanes side by side, of which lane l of each four ends with row l of
//             their patches. Others, of 16 rows or more: a thread's columns, then warps below one
//             another through shared memory. A cell within a tile is stored once; atomics raise
//             cells of several tiles
//     cast    a direction has four factors a thread, of cells of either shape: of its four
//             columns, or, of patch p, of row l. Both directions' flat codes are in W's order: a
//             patch is four bytes (two, of nibbles) of four rows of each
//
// 2 or 4 bytes an element read; the cast writes a code for each direction.
#include <algorithm>
#include <type_traits>

#include "cuda/sharded/shard_pairs.cuh"

namespace minifloat::cuda {
namespace {

constexpr int kSide = 4, kPatches = 4;            // of a patch; a thread's patches
constexpr unsigned kWarpRows = kSide * kPatches;  // 16
constexpr int kWarpRowsLog2 = 4, kTileLog2 = 7;
constexpr int kAmaxBlocks = 4, kCastBlocks = 4;  // minimum blocks per SM, by registers
static_assert(kVec == kSide * kSide && kTile == 32 * kSide && kTile == 8 * kWarpRows);

__device__ __forceinline__ unsigned lane() { return threadIdx.x % 32; }
__device__ __forceinline__ unsigned warp() { return threadIdx.x / 32; }

// ---- Patches ------------------------------------------------------------------------------------
// A thread's column of patches. Row r of a patch is elements 4 r to 4 r + 3 of its vec16.
struct Patches {
  std::uint32_t row, col;  // of the first one
  bool is_whole;           // the shard has all of the warp's
  bool is_aligned;         // rows of a patch can be read at once
};
__device__ __forceinline__ Patches patches_of(const ShardEntry& e, const TileOfShard& tile) {
  const std::uint32_t row = tile.row + warp() * kWarpRows;
  const std::int64_t first = std::int64_t{row} * e.cols + tile.col;
  const std::int64_t end = first + std::int64_t{kWarpRows - 1} * e.cols + kTile;
  const unsigned bytes = e.is_bf16 ? 8 : 16;
  const bool is_aligned = e.cols % kSide == 0 && e.begin % kSide == 0 &&
                          reinterpret_cast<std::uintptr_t>(e.master) % bytes == 0;
  const bool is_whole =
      row + kWarpRows <= e.rows && tile.col + kTile <= e.cols && first >= e.begin && end <= e.end;
  return {row, tile.col + lane() * kSide, is_whole, is_aligned};
}

// Loads one row of a patch, from a multiple of its bytes.
template <class T>
__device__ __forceinline__ void load_row(const ShardEntry& e, std::int64_t i, float* to) {
  const T* from = static_cast<const T*>(e.master) + i;
  if constexpr (sizeof(T) == 2) {
    const uint2 pairs = __ldg(reinterpret_cast<const uint2*>(from));
    to[0] = bit_cast<float>(pairs.x << 16), to[1] = bit_cast<float>(pairs.x & 0xFFFF'0000u);
    to[2] = bit_cast<float>(pairs.y << 16), to[3] = bit_cast<float>(pairs.y & 0xFFFF'0000u);
  } else {
    const float4 v = __ldg(reinterpret_cast<const float4*>(from));
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
}
template <class T>
__device__ __forceinline__ void load_rows(const ShardEntry& e, std::int64_t first, float* to) {
#pragma unroll
  for (int r = 0; r < kSide; ++r) load_row<T>(e, first + std::int64_t{r} * e.cols, to + r * kSide);
}

// Loads patch p, zero where it is another shard's.
__device__ __forceinline__ Vec16<float> load_patch(const ShardEntry& e, const Patches& at, int p) {
  Vec16<float> patch = {};
  const std::uint32_t row = at.row + p * kSide;
  const std::int64_t first = std::int64_t{row} * e.cols + at.col - e.begin;
  if (at.is_whole && at.is_aligned) {
    e.is_bf16 ? load_rows<Bf16>(e, first, patch.v) : load_rows<float>(e, first, patch.v);
    return patch;
  }
#pragma unroll 1
  for (int r = 0; r < kSide; ++r) {
    const Inside<kSide> in = inside<kSide>(e, row + r, at.col);
    const std::int64_t i = first + std::int64_t{r} * e.cols;
    float v[kSide] = {};
    if (in.all() && at.is_aligned) {
      e.is_bf16 ? load_row<Bf16>(e, i, v) : load_row<float>(e, i, v);
    } else {
#pragma unroll
      for (int k = 0; k < kSide; ++k)
        if (in.has(k))
          v[k] = e.is_bf16 ? decode_bf16(static_cast<const Bf16*>(e.master)[i + k])
                           : static_cast<const float*>(e.master)[i + k];
    }
#pragma unroll
    for (int k = 0; k < kVec; ++k)
      if (k / kSide == r) patch.v[k] = v[k % kSide];  // in registers
  }
  return patch;
}

// Calls body(patch, p) for each patch, in the compute dtype, with the next load in flight. The loop
// is not unrolled: unrolled, the kernels outgrow the instruction cache.
template <class Body>
__device__ __forceinline__ void each_patch(const ShardEntry& e, const Patches& at,
                                           Vec16<float> patch, Body body) {
#pragma unroll 1
  for (int p = 0; p < kPatches; ++p) {
    Vec16<float> now = patch;
    if (p + 1 < kPatches) patch = load_patch(e, at, p + 1);
    round_as_asked(e, now);
    body(now, p);
  }
}

// ---- amax ---------------------------------------------------------------------------------------
// Stores the amax of a cell of one tile, or raises that of a cell of several tiles.
__device__ __forceinline__ void put(const ShardEntry& e, std::uint32_t row, std::uint32_t col,
                                    std::uint32_t m, bool is_shared) {
  if (row >= e.rows || col >= e.cols) return;
  std::uint32_t* cell = e.amaxes + e.cell(row, col);
  if (!is_shared)
    *cell = m;
  else if (m > 0)
    atomicMax(cell, m);
}

// Exchanges the maxima of a patch's rows: lane l of each four gets that of row l, over their 16
// columns.
__device__ __forceinline__ std::uint32_t exchange_rows(const std::uint32_t (&m)[kSide]) {
  const bool upper = lane() & 2, odd = lane() & 1;
  const std::uint32_t a = upper ? m[2] : m[0], b = upper ? m[3] : m[1];
  const std::uint32_t a2 = max(a, __shfl_xor_sync(kAllLanes, upper ? m[0] : m[2], 2));
  const std::uint32_t b2 = max(b, __shfl_xor_sync(kAllLanes, upper ? m[1] : m[3], 2));
  return max(odd ? b2 : a2, __shfl_xor_sync(kAllLanes, odd ? a2 : b2, 1));
}
// Stores cells of one row.   m: of row `row` and the 16 columns from `col` on; four lanes further,
// of the next 16
__device__ __forceinline__ void put_row(const ShardEntry& e, std::uint32_t row, std::uint32_t col,
                                        std::uint32_t m) {
  const int lanes_log2 = min(e.width_log2, kTileLog2) - 4;  // groups of four lanes
  for (int i = 0; i < lanes_log2; ++i) m = max(m, __shfl_xor_sync(kAllLanes, m, 4 << i));
  if ((lane() / 4 & ((1u << lanes_log2) - 1)) == 0) put(e, row, col, m, e.width_log2 > kTileLog2);
}
// Stores cells of 16 rows and more.   columns: of every thread's columns
__device__ __forceinline__ void put_columns(const ShardEntry& e, const Patches& at,
                                            const uint4 (&columns)[kThreads]) {
  const unsigned warps = 1u << (min(e.height_log2, kTileLog2) - kWarpRowsLog2);
  if (warp() % warps != 0) return;
  uint4 m = columns[threadIdx.x];
#pragma unroll 1
  for (unsigned i = 1; i < warps; ++i) {
    const uint4 below = columns[threadIdx.x + 32 * i];
    m = {max(m.x, below.x), max(m.y, below.y), max(m.z, below.z), max(m.w, below.w)};
  }
  const bool is_shared = max(e.height_log2, e.width_log2) > kTileLog2;
  if (e.width_log2 > 0) {
    const int lanes_log2 = min(e.width_log2, kTileLog2) - 2;
    const std::uint32_t all = amax_of_lanes(max(max(m.x, m.y), max(m.z, m.w)), lanes_log2);
    if ((lane() & ((1u << lanes_log2) - 1)) == 0) put(e, at.row, at.col, all, is_shared);
    return;
  }
  std::uint32_t* cells = e.amaxes + e.cell(at.row, at.col);
  if (!is_shared && at.row < e.rows && at.col + kSide <= e.cols &&
      reinterpret_cast<std::uintptr_t>(cells) % 16 == 0) {
    *reinterpret_cast<uint4*>(cells) = m;
    return;
  }
  put(e, at.row, at.col, m.x, is_shared), put(e, at.row, at.col + 1, m.y, is_shared);
  put(e, at.row, at.col + 2, m.z, is_shared), put(e, at.row, at.col + 3, m.w, is_shared);
}
// Raises the whole weight's amax by the largest of a tile.
__device__ __forceinline__ void put_tensors(const ShardPair& pair,
                                            const uint4 (&columns)[kThreads]) {
  if (warp() != 0) return;
  std::uint32_t m = 0;
#pragma unroll 1
  for (unsigned i = lane(); i < kThreads; i += 32)
    m = max(max(m, max(columns[i].x, columns[i].y)), max(columns[i].z, columns[i].w));
  m = __reduce_max_sync(kAllLanes, m);
  if (lane() != 0) return;
  for (int i = 0; i < pair.count; ++i)
    if (pair.of[i].has_tensor_amax)
      atomicMax(pair.of[i].amaxes + pair.of[i].grid_rows * pair.of[i].grid_cols, m);
}

__global__ void __launch_bounds__(kThreads, kAmaxBlocks)
    amax_of_shard_pairs(const __grid_constant__ TableView<ShardPair> table) {
  __shared__ ShardPair pair;
  __shared__ uint4 columns[kThreads];
  const std::uint32_t tile = find_entry(table, pair);
  const ShardEntry& master = pair.of[0];
  const Patches at = patches_of(master, tile_of(master, tile));

  // ---- Rows, patch by patch; columns, all the way down
  const bool is_pair = pair.count == 2;
  const bool has_rows = pair.of[0].height_log2 == 0 || (is_pair && pair.of[1].height_log2 == 0);
  uint4 largest = {};
  each_patch(master, at, load_patch(master, at, 0), [&](const Vec16<float>& patch, int p) {
    std::uint32_t of_rows[kSide];
#pragma unroll
    for (int r = 0; r < kSide; ++r) {
      const uint4 v = {magnitude_bits(patch[r * kSide]), magnitude_bits(patch[r * kSide + 1]),
                       magnitude_bits(patch[r * kSide + 2]), magnitude_bits(patch[r * kSide + 3])};
      of_rows[r] = max(max(v.x, v.y), max(v.z, v.w));
      largest = {max(largest.x, v.x), max(largest.y, v.y), max(largest.z, v.z),
                 max(largest.w, v.w)};
    }
    if (!has_rows) return;
    const std::uint32_t of_row = magnitude_in(master, exchange_rows(of_rows));
    for (int i = 0; i < pair.count; ++i)
      if (pair.of[i].height_log2 == 0)
        put_row(pair.of[i], at.row + p * kSide + lane() % kSide, at.col / kVec * kVec, of_row);
  });
  columns[threadIdx.x] = {magnitude_in(master, largest.x), magnitude_in(master, largest.y),
                          magnitude_in(master, largest.z), magnitude_in(master, largest.w)};
  __syncthreads();

  // ---- Cells of more rows
  for (int i = 0; i < pair.count; ++i)
    if (pair.of[i].height_log2 > 0) put_columns(pair.of[i], at, columns);
  if (pair.of[0].has_tensor_amax || (is_pair && pair.of[1].has_tensor_amax))
    put_tensors(pair, columns);
}

// ---- Codes --------------------------------------------------------------------------------------
// The factors of patches. Of cells one column wide: those of a patch's columns. Of others: that of
// the lane's row, the first patch's first. Zero: an NVFP4 block that has zero codes.
struct FactorsOfPatches {
  float f[kSide];
};
template <class F>
__device__ __forceinline__ FactorsOfPatches factors_of(const ShardEntry& e, const Patches& at) {
  const bool is_narrow = e.width_log2 == 0;
  std::uint32_t amaxes[kSide];
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    const std::uint32_t row = is_narrow ? at.row : at.row + i * kSide + lane() % kSide;
    const std::uint32_t col = is_narrow ? at.col + i : at.col;
    amaxes[i] = __ldg(e.amaxes + e.cell(min(row, e.rows - 1), min(col, e.cols - 1)));
  }
  const MatrixScale matrix = scale_of_weight<F>(e);
  FactorsOfPatches factors;
#pragma unroll
  for (int i = 0; i < kSide; ++i) {
    const BlockScale block =
        block_scale<F>(e.rule, e.rounding, matrix, with_shard_choice(e, amaxes[i]));
    factors.f[i] = has_zero_codes(e.rule, block.code) ? 0.0f : block.encode;
  }
  return factors;
}

// Returns x times the factor. The encoder then multiplies by 1, which is exact.
template <class F>
__device__ __forceinline__ float scaled(float x, float factor) {
  const float v = x * factor;
  if constexpr (F::kBits == 8) return v;
  if (factor == 0.0f) return 0.0f;  // without a sign
  return v != v ? F::kMax : v;      // no NaN of 4 bits: +kMax
}
// Encodes the next patch: each call takes the first patch's factor from the front.
template <class F>
__device__ __forceinline__ Codes<F> encode_patch(const ShardEntry& e, FactorsOfPatches& factors,
                                                 const Vec16<float>& patch) {
  Vec16<float> v;
  float (&f)[kSide] = factors.f;
  if (e.width_log2 == 0) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) v.v[i] = scaled<F>(patch[i], f[i % kSide]);
  } else {
#pragma unroll
    for (int r = 0; r < kSide; ++r) {
      const float factor = __shfl_sync(kAllLanes, f[0], r, kSide);
#pragma unroll
      for (int k = r * kSide; k < (r + 1) * kSide; ++k) v.v[k] = scaled<F>(patch[k], factor);
    }
    f[0] = f[1], f[1] = f[2], f[2] = f[3];
  }
  return encode_vec<F, false>(v, {1.0f, false, false, false}, RandomBits{});
}

// Returns the codes of row r of a patch: word r, or half a word.
template <class F>
__device__ __forceinline__ std::uint32_t codes_of_row(const Codes<F>& codes, int r) {
  std::uint32_t row = 0;
#pragma unroll
  for (int i = 0; i < kSide; ++i)
    if (i == r) row = F::kBits == 8 ? codes.w[i] : codes.w[i / 2] >> (i % 2 * 16) & 0xFFFFu;
  return row;
}
template <class F>
__device__ __forceinline__ void store_patch(const ShardEntry& e, const Patches& at, int p,
                                            const Codes<F>& codes) {
  using Word = std::conditional_t<F::kBits == 8, std::uint32_t, std::uint16_t>;
  const std::uint32_t row = at.row + p * kSide;
  std::uint8_t* to = flat_codes_at<F>(e, row, at.col);
  const bool is_aligned = (reinterpret_cast<std::uintptr_t>(to) | e.pitch) % sizeof(Word) == 0;
  if (at.is_whole && is_aligned) {
#pragma unroll
    for (int r = 0; r < kSide; ++r, to += e.pitch)
      *reinterpret_cast<Word*>(to) = static_cast<Word>(codes_of_row(codes, r));
    return;
  }
#pragma unroll 1
  for (int r = 0; r < kSide; ++r, to += e.pitch) {
    const Inside<kSide> in = inside<kSide>(e, row + r, at.col);
    if (in.all() && is_aligned)
      *reinterpret_cast<Word*>(to) = static_cast<Word>(codes_of_row(codes, r));
    else if (in.any())
      store_run<F>(e, to, Codes<F>{codes_of_row(codes, r)}, at.col, in);
  }
}

template <class First, class Second>
__global__ void __launch_bounds__(kThreads, kCastBlocks)
    cast_of_shard_pairs(const __grid_constant__ TableView<ShardPair> table) {
  constexpr bool kIsPair = !std::is_same_v<Second, Absent>;
  __shared__ ShardPair pair;
  const std::uint32_t tile = find_entry(table, pair);
  const ShardEntry &first = pair.of[0], &second = pair.of[1];
  const Patches at = patches_of(first, tile_of(first, tile));
  const Vec16<float> patch = load_patch(first, at, 0);  // in flight while factors are found
  FactorsOfPatches of_first = factors_of<First>(first, at), of_second = {};
  if constexpr (kIsPair) of_second = factors_of<Second>(second, at);
  each_patch(first, at, patch, [&](const Vec16<float>& now, int p) {
    store_patch<First>(first, at, p, encode_patch<First>(first, of_first, now));
    if constexpr (kIsPair)
      store_patch<Second>(second, at, p, encode_patch<Second>(second, of_second, now));
  });
}

// Whether one kernel casts both formats: E1M2 has none beside another format (is_pair).
template <class F, class Second>
constexpr bool kHasPair = std::is_same_v<F, Second> || std::is_same_v<Second, Absent> ||
                          !(std::is_same_v<F, E1M2> || std::is_same_v<Second, E1M2>);
template <class F, class Second>
void launch_pairs(const Table<ShardPair>& pairs, const Execution& execution) {
  if constexpr (kHasPair<F, Second>)
    launch_over(pairs, cast_of_shard_pairs<F, Second>, "partial_cast", execution);
}
template <class F>
void cast_pairs_with(Elements second, const Table<ShardPair>& pairs, const Execution& execution) {
  switch (second) {
    case Elements::kE4m3: return launch_pairs<F, E4M3>(pairs, execution);
    case Elements::kE5m2: return launch_pairs<F, E5M2>(pairs, execution);
    case Elements::kE2m1: return launch_pairs<F, E2M1>(pairs, execution);
    case Elements::kE1m2: return launch_pairs<F, E1M2>(pairs, execution);
    case Elements::kBf16: return launch_pairs<F, Absent>(pairs, execution);
  }
}

}  // namespace

void amax_of_pairs(const Table<ShardPair>& pairs, const Execution& execution) {
  launch_over(pairs, amax_of_shard_pairs, "partial_amax", execution);
}

void cast_pairs(Elements first, Elements second, const Table<ShardPair>& pairs,
                const Execution& execution) {
  switch (first) {
    case Elements::kE4m3: return cast_pairs_with<E4M3>(second, pairs, execution);
    case Elements::kE5m2: return cast_pairs_with<E5M2>(second, pairs, execution);
    case Elements::kE2m1: return cast_pairs_with<E2M1>(second, pairs, execution);
    case Elements::kE1m2: return cast_pairs_with<E1M2>(second, pairs, execution);
    case Elements::kBf16: return;
  }
}

}  // namespace minifloat::cuda
