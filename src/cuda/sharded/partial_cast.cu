// Partial casts: a block of threads takes 128 x 128 of a weight, over the tiles that any shard
// touches. A thread takes one vec16 at a time.
//
//     amax      2 or 4 bytes an element read; cells are raised by integer atomics, once a tile
//     cast      2 or 4 bytes read, a code written; then a scale a cell, of whole weights
//
// Cells one column wide, and two directions from one read: partial_cast_pairs.cu.
#include "cuda/backend.h"
#include "cuda/common/batch.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/sharded/shard_pairs.cuh"

namespace minifloat::cuda {
namespace {

// ---- amax ---------------------------------------------------------------------------------------
// Reduces amaxes along the lanes of a row, then down the rows through shared memory.
__device__ __forceinline__ std::uint32_t amax_of_vecs(const ShardEntry& e, const TileOfShard& tile,
                                                      std::uint32_t (&cells)[kVecColumns * 8]) {
  const bool is_tensor = e.height_log2 == kAll && e.width_log2 == kAll;
  const bool is_row = e.height_log2 == 0;
  if (threadIdx.x < kVecColumns * 8) cells[threadIdx.x] = 0;
  Vec16<float> vecs[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const std::uint32_t row = tile.vec_row(i);
    vecs[i] = load_master(e, row, tile.vec_col(), inside(e, row, tile.vec_col()));
  }
  __syncthreads();

  const int lanes_log2 = min(e.width_log2 - 4, 3);  // of a cell, in this tile
  const unsigned vec_col = threadIdx.x % kVecColumns, lane = threadIdx.x % 32;
  std::uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    std::uint32_t m = magnitude_in(e, vecs[i].amax());
    all = max(all, m);
    if (is_tensor) continue;
    m = amax_of_lanes(m, lanes_log2);
    const bool is_first = (vec_col & ((1u << lanes_log2) - 1)) == 0;
    const std::uint32_t row = tile.vec_row(i);
    if (is_row) {
      if (is_first && m > 0) atomicMax(e.amaxes + e.cell(row, tile.vec_col()), m);
      continue;
    }
    m = max(m, __shfl_xor_sync(kAllLanes, m, 8));  // a warp has 4 rows of a cell
    m = max(m, __shfl_xor_sync(kAllLanes, m, 16));
    const unsigned down = (row - tile.row) >> e.height_log2;
    if (is_first && lane < kVecColumns && m > 0) atomicMax(&cells[down * kVecColumns + vec_col], m);
  }
  if (is_tensor || is_row) return all;
  __syncthreads();
  if (threadIdx.x < kVecColumns * 8) {
    const std::uint32_t m = cells[threadIdx.x];
    const std::uint32_t row = tile.row + ((threadIdx.x / kVecColumns) << e.height_log2);
    if (m > 0) atomicMax(e.amaxes + e.cell(row, tile.vec_col()), m);
  }
  return all;
}

__global__ void __launch_bounds__(kThreads, 3)
    amax_of_shards(const __grid_constant__ TableView<ShardEntry> table) {
  __shared__ ShardEntry e;
  __shared__ std::uint32_t cells[kVecColumns * 8];
  const TileOfShard tile = tile_of(e, find_entry(table, e));
  const std::uint32_t all = amax_of_vecs(e, tile, cells);
  const bool is_tensor = e.height_log2 == kAll && e.width_log2 == kAll;
  if (is_tensor || e.has_tensor_amax)
    raise_by_block(e.amaxes + (is_tensor ? 0 : e.grid_rows * e.grid_cols), all);
}

// ---- Scales -------------------------------------------------------------------------------------
// Returns the stored scale of a cell: bits of an fp32 scale, or a code.
template <class F>
__device__ __forceinline__ std::uint32_t stored_scale(const ShardEntry& e,
                                                      const MatrixScale& matrix,
                                                      std::uint32_t amax) {
  if constexpr (F::kBits == 8) {
    if (e.rule == ScaleRule::kTensor) return bit_cast<std::uint32_t>(matrix.scale);
    if (e.rule == ScaleRule::kRow)
      return bit_cast<std::uint32_t>(fp32_factors<F>(e.rule, e.rounding, amax).scale);
  }
  const BlockScale block = block_scale<F>(e.rule, e.rounding, matrix, with_shard_choice(e, amax));
  return e.rule == ScaleRule::kBlock ? bit_cast<std::uint32_t>(block.scale) : block.code;
}

// Stores four neighbouring scales, or the first `left` of them.
__device__ __forceinline__ void store_scales(const ShardEntry& e, std::uint64_t at,
                                             const std::uint32_t (&bits)[4], std::uint32_t left) {
  auto* codes = static_cast<std::uint8_t*>(e.scale) + at;
  auto* words = static_cast<std::uint32_t*>(e.scale) + at;
  const bool has_codes = e.rule == ScaleRule::kMx || e.rule == ScaleRule::kNvfp4;
  if (has_codes && left >= 4 && reinterpret_cast<std::uintptr_t>(codes) % 4 == 0) {
    *reinterpret_cast<std::uint32_t*>(codes) =
        bits[0] | bits[1] << 8 | bits[2] << 16 | bits[3] << 24;
    return;
  }
#pragma unroll
  for (unsigned k = 0; k < 4; ++k) {
    if (k >= left) return;
    if (has_codes)
      codes[k] = static_cast<std::uint8_t>(bits[k]);
    else
      words[k] = bits[k];
  }
}

// Loads the amaxes of four neighbouring cells, zero past `left`.
__device__ __forceinline__ uint4 load_cells(const std::uint32_t* from, std::uint32_t left) {
  if (left >= 4 && reinterpret_cast<std::uintptr_t>(from) % 16 == 0)
    return __ldg(reinterpret_cast<const uint4*>(from));
  return {left > 0 ? __ldg(from) : 0, left > 1 ? __ldg(from + 1) : 0,
          left > 2 ? __ldg(from + 2) : 0, left > 3 ? __ldg(from + 3) : 0};
}

// The cells of a whole weight that a block takes: 64 x 64, four of a row a thread at a time.
// Columnwise scales are stored transposed.
inline constexpr unsigned kCells = 64, kCellStep = kThreads / (kCells / 4);
template <class F>
__global__ void __launch_bounds__(kThreads)
    scales_of_weights(const __grid_constant__ TableView<ShardEntry> table) {
  __shared__ ShardEntry e;
  __shared__ std::uint32_t transposed[kCells][kCells + 1];
  const std::uint32_t tile = find_entry(table, e);
  const std::uint32_t row = tile / e.across * kCells, col = tile % e.across * kCells;
  const unsigned x = threadIdx.x % (kCells / 4) * 4, y = threadIdx.x / (kCells / 4);
  const std::uint32_t in_row = col + x < e.grid_cols ? e.grid_cols - col - x : 0;
  uint4 amaxes[kCells / kCellStep];
#pragma unroll
  for (unsigned i = 0; i < kCells / kCellStep; ++i) {
    const std::uint32_t r = row + y + i * kCellStep;
    amaxes[i] = load_cells(e.amaxes + std::uint64_t{r} * e.grid_cols + col + x,
                           r < e.grid_rows ? in_row : 0);
  }
  const MatrixScale matrix = scale_of_weight<F>(e);
  const bool has_amax = e.amax && (e.rule == ScaleRule::kRow || e.rule == ScaleRule::kTensor);
#pragma unroll
  for (unsigned i = 0; i < kCells / kCellStep; ++i) {
    const unsigned r = y + i * kCellStep;
    const std::uint32_t amax[4] = {amaxes[i].x, amaxes[i].y, amaxes[i].z, amaxes[i].w};
    const std::uint32_t left = row + r < e.grid_rows ? in_row : 0;
    const std::uint64_t cell = std::uint64_t{row + r} * e.grid_cols + col + x;
    std::uint32_t bits[4];
#pragma unroll
    for (unsigned k = 0; k < 4; ++k) {
      bits[k] = stored_scale<F>(e, matrix, amax[k]);
      if (has_amax && k < left) e.amax[cell + k] = bit_cast<float>(amax[k]);
      if (e.columnwise) transposed[r][x + k] = bits[k];
    }
    if (!e.columnwise) store_scales(e, cell, bits, left);
  }
  if (e.amax && e.has_tensor_amax && tile == 0 && threadIdx.x == 0)
    e.amax[0] = bit_cast<float>(e.amaxes[e.grid_rows * e.grid_cols]);
  if (!e.columnwise) return;
  __syncthreads();
  const std::uint32_t in_column = row + x < e.grid_rows ? e.grid_rows - row - x : 0;
#pragma unroll
  for (unsigned c = y; c < kCells; c += kCellStep) {
    if (col + c >= e.grid_cols) return;
    const std::uint32_t bits[4] = {transposed[x][c], transposed[x + 1][c], transposed[x + 2][c],
                                   transposed[x + 3][c]};
    store_scales(e, std::uint64_t{col + c} * e.grid_rows + row + x, bits, in_column);
  }
}

// ---- Codes --------------------------------------------------------------------------------------
template <class F>
__device__ __forceinline__ Codes<F> encode_master(const ShardEntry& e, const MatrixScale& matrix,
                                                  const Vec16<float>& vec, std::uint32_t row,
                                                  std::uint32_t col) {
  const std::uint32_t amax = with_shard_choice(e, __ldg(e.amaxes + e.cell(row, col)));
  const BlockScale block = block_scale<F>(e.rule, e.rounding, matrix, amax);
  return encode_vec<F, false>(
      vec, {block.encode, has_zero_codes(e.rule, block.code), e.delayed, block.takes_fast_path},
      RandomBits{});
}

template <class F>
__device__ __forceinline__ void store_flat_codes(const ShardEntry& e, Codes<F> codes,
                                                 std::uint32_t row, std::uint32_t col,
                                                 const Inside<>& in) {
  std::uint8_t* to = flat_codes_at<F>(e, row, col);
  constexpr int kBytes = kVec * F::kBits / 8;
  const auto address = reinterpret_cast<std::uintptr_t>(to);
  if (in.all() && address % kBytes == 0) return store_vec<F>(to, 0, codes);
  if (in.all() && address % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) reinterpret_cast<std::uint32_t*>(to)[i] = codes.w[i];
    return;
  }
  store_run<F>(e, to, codes, col, in);
}

template <class F>
__global__ void __launch_bounds__(kThreads, 3)
    cast_of_shards(const __grid_constant__ TableView<ShardEntry> table) {
  __shared__ ShardEntry e;
  const TileOfShard tile = tile_of(e, find_entry(table, e));
  const std::uint32_t col = tile.vec_col();
  Inside<> in = inside(e, tile.vec_row(0), col);
  Vec16<float> vec = load_master(e, tile.vec_row(0), col, in);
  const MatrixScale matrix = scale_of_weight<F>(e);
#pragma unroll 1
  for (int i = 0; i < kPasses; ++i) {
    const Inside<> now = in;
    const Vec16<float> values = vec;
    if (i + 1 < kPasses) {  // in flight
      in = inside(e, tile.vec_row(i + 1), col);
      vec = load_master(e, tile.vec_row(i + 1), col, in);
    }
    if (!now.any()) continue;
    const std::uint32_t row = tile.vec_row(i);
    store_flat_codes<F>(e, encode_master<F>(e, matrix, values, row, col), row, col, now);
  }
}

// ---- Launches -----------------------------------------------------------------------------------
int log2_of(std::int64_t cell, std::int64_t all) {
  if (cell == 1) return 0;
  return cell == 16 ? 4 : cell == 32 ? 5 : cell == 128 && all != 1 ? 7 : kAll;
}

void set_tiles(ShardEntry& e, std::uint32_t across, std::uint32_t first_row) {
  e.across = across, e.first_tile_row = first_row;
}
void set_tiles(ShardPair& pair, std::uint32_t across, std::uint32_t first_row) {
  for (ShardEntry& e : pair.of) set_tiles(e, across, first_row);
}
template <class Entry>
void add_shard(Table<Entry>& table, const PartialCast& cast, Entry entry) {
  const Span rows = FlatShard{cast.cols, cast.shard}.block_rows(kTile);
  const auto across = static_cast<std::uint32_t>(ceil_div<std::int64_t>(cast.cols, kTile));
  set_tiles(entry, across, static_cast<std::uint32_t>(rows.begin));
  table.add(entry, rows.size() * across);
}
void add_grid(Table<ShardEntry>& table, ShardEntry e) {
  e.across = ceil_div(e.grid_cols, kCells);
  table.add(e, std::int64_t{e.across} * ceil_div(e.grid_rows, kCells));
}

// Returns whether cells are one column wide.
bool is_narrow(const ShardEntry& e) { return e.width_log2 == 0; }
// Returns whether one read of their master serves both directions, by a kernel that there is.
bool is_pair(const PartialCast& a, const PartialCast& b) {
  const bool has_kernel =
      a.spec.elements == b.spec.elements ||
      (a.spec.elements != Elements::kE1m2 && b.spec.elements != Elements::kE1m2);
  return has_kernel && !a.shard.empty() && a.master == b.master && a.dtype == b.dtype &&
         a.compute == b.compute && a.rows == b.rows && a.cols == b.cols &&
         a.shard.begin == b.shard.begin && a.shard.end == b.shard.end && !a.spec.delayed &&
         !b.spec.delayed;
}
// Calls both(cast, next) for two consecutive casts that are a pair, and alone(cast) for each other.
template <class Alone, class Both>
void each_shard(std::span<const PartialCast> casts, Alone alone, Both both) {
  for (std::size_t i = 0; i < casts.size(); ++i) {
    if (i + 1 < casts.size() && is_pair(casts[i], casts[i + 1])) {
      both(casts[i], casts[i + 1]);
      ++i;
    } else {
      alone(casts[i]);
    }
  }
}

// The casts into each element format, and the pairs into each two.
constexpr std::size_t kFormats = kAllElements.size(),
                      kNoFormat = static_cast<std::size_t>(Elements::kBf16);
struct CastTables {
  Table<ShardEntry> shards[kFormats], grids[kFormats];
  Table<ShardPair> pairs[kFormats][kFormats];
};
std::size_t format_of(const PartialCast& cast) {
  return static_cast<std::size_t>(cast.spec.elements);
}
CastTables tables_of(std::span<const PartialCast> casts) {
  CastTables tables;
  const auto entry_with_grid = [&](const PartialCast& cast) {
    const ShardEntry e = entry_of(cast);
    add_grid(tables.grids[format_of(cast)], e);
    return e;
  };
  each_shard(
      casts,
      [&](const PartialCast& cast) {
        const ShardEntry e = entry_with_grid(cast);
        if (is_narrow(e))
          add_shard(tables.pairs[format_of(cast)][kNoFormat], cast, ShardPair{{e, {}}, 1});
        else
          add_shard(tables.shards[format_of(cast)], cast, e);
      },
      [&](const PartialCast& a, const PartialCast& b) {
        add_shard(tables.pairs[format_of(a)][format_of(b)], a,
                  ShardPair{{entry_with_grid(a), entry_with_grid(b)}, 2});
      });
  return tables;
}

// Casts into one element format. Scales are last: under +delayed codes are made with the amax that
// the scales' kernel replaces.
template <class F>
void cast_elements(const CastTables& tables, Elements elements, const Execution& execution) {
  const auto format = static_cast<std::size_t>(elements);
  launch_over(tables.shards[format], cast_of_shards<F>, "partial_cast", execution);
  for (const Elements second : kAllElements)
    cast_pairs(elements, second, tables.pairs[format][static_cast<std::size_t>(second)], execution);
  launch_over(tables.grids[format], scales_of_weights<F>, "partial_cast", execution);
}

}  // namespace

ShardEntry entry_of(const PartialCast& cast) {
  MINIFLOAT_CHECK(
      cast.rows < (std::int64_t{1} << 31) - kTile && cast.cols < (std::int64_t{1} << 31) - kTile,
      "partial_cast: expected less than 2^31 rows and columns, got ", cast.rows, " x ", cast.cols);
  const Spec& spec = cast.spec;
  const AmaxGrid grid = amax_grid(spec, cast.columnwise, cast.rows, cast.cols);
  const bool has_blocks = spec.has_blocks();
  ShardEntry e = {};
  e.master = cast.master, e.amaxes = cast.amaxes, e.codes = cast.codes;
  e.scale = cast.scale, e.amax = cast.amax;
  e.begin = cast.shard.begin, e.end = cast.shard.end, e.first_byte = cast.first_byte;
  e.rows = static_cast<std::uint32_t>(cast.rows), e.cols = static_cast<std::uint32_t>(cast.cols);
  e.pitch = static_cast<std::uint32_t>(spec.code_cols(cast.cols));
  e.grid_rows = static_cast<std::uint32_t>(grid.rows);
  e.grid_cols = static_cast<std::uint32_t>(grid.cols);
  e.height_log2 = has_blocks || grid.rows > 1 ? log2_of(grid.height, grid.rows) : kAll;
  e.width_log2 = has_blocks || grid.cols > 1 ? log2_of(grid.width, grid.cols) : kAll;
  e.rule = spec.rule, e.rounding = spec.scale_rounding;
  e.has_tensor_amax = grid.has_tensor_amax;
  e.delayed = spec.delayed, e.columnwise = cast.columnwise;
  e.is_bf16 = cast.dtype == DType::kBFloat16;
  e.rounds = !e.is_bf16 && cast.compute == DType::kBFloat16;
  e.keeps_other_nibbles = cast.keeps_other_nibbles;
  return e;
}

void partial_amax(std::span<const PartialCast> casts, const Execution& execution) {
  Table<ShardEntry> shards;
  Table<ShardPair> pairs;
  each_shard(
      casts,
      [&](const PartialCast& cast) {
        const ShardEntry e = entry_of(cast);
        is_narrow(e) ? add_shard(pairs, cast, ShardPair{{e, {}}, 1}) : add_shard(shards, cast, e);
      },
      [&](const PartialCast& a, const PartialCast& b) {
        add_shard(pairs, a, ShardPair{{entry_of(a), entry_of(b)}, 2});
      });
  launch_over(shards, amax_of_shards, "partial_amax", execution);
  amax_of_pairs(pairs, execution);
}

void partial_cast(std::span<const PartialCast> casts, const Execution& execution) {
  const CastTables tables = tables_of(casts);
  for (const Elements elements : kAllElements) switch (elements) {
      case Elements::kE4m3: cast_elements<E4M3>(tables, elements, execution); break;
      case Elements::kE5m2: cast_elements<E5M2>(tables, elements, execution); break;
      case Elements::kE2m1: cast_elements<E2M1>(tables, elements, execution); break;
      case Elements::kE1m2: cast_elements<E1M2>(tables, elements, execution); break;
      case Elements::kBf16: break;
    }
}

}  // namespace minifloat::cuda
