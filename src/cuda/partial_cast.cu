// Partial casts: 128 x 128 of a weight a block of threads, over the tiles that any shard touches, a unit of 16 neighbours
// a thread at a time.
//
//     amax      4 bytes an element read; cells are raised by integer atomics, once a tile
//     cast      4 bytes read, a code written; then a scale a cell, of whole weights
//
// Cells one column wide are read a column a thread for their amax, and lend each element of a unit a factor of its own.
#include <vector>

#include "backend.h"
#include "cast_unit.cuh"
#include "many.cuh"
#include "reduce.cuh"
#include "shard.cuh"

namespace minifloat::cuda {
namespace {

// ---- amax ----------------------------------------------------------------------------------------
// A NaN that was rounded has the bits that the CPU gives it; one that was not keeps its own.
__device__ __forceinline__ std::uint32_t magnitude_in(const ShardEntry& e, std::uint32_t bits) {
  return e.rounds ? canonical_magnitude(bits) : bits;
}

// Cells one column wide: a thread goes down 64 rows of a column, 16 at a time.
__device__ __forceinline__ std::uint32_t amax_of_columns(const ShardEntry& e,
                                                         const TileOfShard& tile) {
  constexpr unsigned kRows = kTile / (kThreads / kTile), kTogether = 16;
  const std::uint32_t col = tile.col + threadIdx.x % kTile;
  const std::uint32_t first = tile.row + threadIdx.x / kTile * kRows;
  std::uint32_t all = 0;
  if (col >= e.cols) return 0;
#pragma unroll 1
  for (std::uint32_t row = first; row < first + kRows; row += kTogether) {
    std::uint32_t m = 0;
#pragma unroll
    for (unsigned i = 0; i < kTogether; ++i) {
      const std::int64_t flat = std::int64_t{row + i} * e.cols + col;
      if (row + i < e.rows && flat >= e.begin && flat < e.end)
        m = max(m, magnitude_bits(load_element(e, flat - e.begin)));
    }
    m = magnitude_in(e, m);
    if (m > 0) atomicMax(e.amaxes + e.cell(row, col), m);
    all = max(all, m);
  }
  return all;
}

// Wider cells: along the lanes of a row, then down the rows through shared memory.
__device__ __forceinline__ std::uint32_t amax_of_units(const ShardEntry& e, const TileOfShard& tile,
                                                       std::uint32_t (&cells)[kUnitColumns * 8]) {
  const bool is_tensor = e.height_log2 == kAll && e.width_log2 == kAll;
  const bool is_row = e.height_log2 == 0;
  if (threadIdx.x < kUnitColumns * 8) cells[threadIdx.x] = 0;
  Unit<float> units[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const std::uint32_t row = tile.unit_row(i);
    units[i] = load_master(e, row, tile.unit_col(), inside(e, row, tile.unit_col()));
  }
  __syncthreads();

  const int lanes_log2 = min(e.width_log2 - 4, 3);  // of a cell, in this tile
  const unsigned unit_col = threadIdx.x % kUnitColumns, lane = threadIdx.x % 32;
  std::uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    std::uint32_t m = magnitude_in(e, units[i].amax());
    all = max(all, m);
    if (is_tensor) continue;
    m = amax_of_lanes(m, lanes_log2);
    const bool is_first = (unit_col & ((1u << lanes_log2) - 1)) == 0;
    const std::uint32_t row = tile.unit_row(i);
    if (is_row) {
      if (is_first && m > 0) atomicMax(e.amaxes + e.cell(row, tile.unit_col()), m);
      continue;
    }
    m = max(m, __shfl_xor_sync(kAllLanes, m, 8));  // a warp has 4 rows of a cell
    m = max(m, __shfl_xor_sync(kAllLanes, m, 16));
    const unsigned down = (row - tile.row) >> e.height_log2;
    if (is_first && lane < kUnitColumns && m > 0)
      atomicMax(&cells[down * kUnitColumns + unit_col], m);
  }
  if (is_tensor || is_row) return all;
  __syncthreads();
  if (threadIdx.x < kUnitColumns * 8) {
    const std::uint32_t m = cells[threadIdx.x];
    const std::uint32_t row = tile.row + ((threadIdx.x / kUnitColumns) << e.height_log2);
    if (m > 0) atomicMax(e.amaxes + e.cell(row, tile.unit_col()), m);
  }
  return all;
}

__global__ void __launch_bounds__(kThreads, 3)
    amax_of_shards(const __grid_constant__ TableView<ShardEntry> table) {
  __shared__ ShardEntry e;
  __shared__ std::uint32_t cells[kUnitColumns * 8];
  const TileOfShard tile = tile_of(e, find_entry(table, e));
  const std::uint32_t all =
      e.width_log2 == 0 ? amax_of_columns(e, tile) : amax_of_units(e, tile, cells);
  const bool is_tensor = e.height_log2 == kAll && e.width_log2 == kAll;
  if (is_tensor || e.has_tensor_amax)
    raise_by_block(e.amaxes + (is_tensor ? 0 : e.grid_rows * e.grid_cols), all);
}

// ---- Scales --------------------------------------------------------------------------------------
template <class F>
__device__ __forceinline__ MatrixScale scale_of_tensor(const ShardEntry& e) {
  if (e.rule == ScaleRule::kTensor)
    return matrix_scale_of<F>(e.rule, e.rounding,
                              e.delayed ? magnitude_bits(e.amax[0]) : e.amaxes[0]);
  if (e.rule == ScaleRule::kNvfp4)
    return matrix_scale_of<F>(e.rule, e.rounding, e.amaxes[e.grid_rows * e.grid_cols]);
  return {};
}

// What is stored for a cell: bits of an fp32 scale, or a code.
template <class F>
__device__ __forceinline__ std::uint32_t stored_scale(const ShardEntry& e,
                                                      const MatrixScale& matrix,
                                                      std::uint32_t amax) {
  if constexpr (F::kBits == 8) {
    if (e.rule == ScaleRule::kTensor) return bit_cast<std::uint32_t>(matrix.fp8.scale);
    if (e.rule == ScaleRule::kRow)
      return bit_cast<std::uint32_t>(
          fp8_factors<F>(amax, e.rounding != ScaleRounding::kExact).scale);
  }
  const BlockScale block = block_scale<F>(e.rule, e.rounding, matrix, amax);
  return e.rule == ScaleRule::kBlock ? bit_cast<std::uint32_t>(block.scale) : block.code;
}

// 32 x 32 cells of a whole weight. Columnwise scales are stored transposed.
inline constexpr unsigned kCells = 32;
template <class F>
__global__ void __launch_bounds__(kThreads)
    scales_of_weights(const __grid_constant__ TableView<ShardEntry> table) {
  __shared__ ShardEntry e;
  __shared__ std::uint32_t turned[kCells][kCells + 1];
  const std::uint32_t tile = find_entry(table, e);
  const std::uint32_t row = tile / e.across * kCells, col = tile % e.across * kCells;
  const unsigned x = threadIdx.x % kCells, y = threadIdx.x / kCells;
  const MatrixScale matrix = scale_of_tensor<F>(e);
  const auto store = [&](std::uint64_t at, std::uint32_t bits) {
    if (e.rule == ScaleRule::kMx || e.rule == ScaleRule::kNvfp4)
      static_cast<std::uint8_t*>(e.scale)[at] = static_cast<std::uint8_t>(bits);
    else
      static_cast<std::uint32_t*>(e.scale)[at] = bits;
  };
  for (unsigned r = y; r < kCells; r += kThreads / kCells) {
    if (row + r >= e.grid_rows || col + x >= e.grid_cols) continue;
    const std::uint64_t cell = std::uint64_t{row + r} * e.grid_cols + col + x;
    const std::uint32_t amax = e.amaxes[cell];
    const std::uint32_t bits = stored_scale<F>(e, matrix, amax);
    if (e.columnwise)
      turned[r][x] = bits;
    else
      store(cell, bits);
    if (e.amax && (e.rule == ScaleRule::kRow || e.rule == ScaleRule::kTensor))
      e.amax[cell] = bit_cast<float>(amax);
  }
  if (e.amax && e.has_tensor_amax && tile == 0 && threadIdx.x == 0)
    e.amax[0] = bit_cast<float>(e.amaxes[e.grid_rows * e.grid_cols]);
  if (!e.columnwise) return;
  __syncthreads();
  for (unsigned c = y; c < kCells; c += kThreads / kCells)
    if (row + x < e.grid_rows && col + c < e.grid_cols)
      store(std::uint64_t{col + c} * e.grid_rows + row + x, turned[x][c]);
}

// ---- Codes ---------------------------------------------------------------------------------------
template <class F>
__device__ __forceinline__ Codes<F> encode_with(const Unit<float>& unit, const Encoding& how) {
  return encode_unit<F, false>(unit, how, Words{});
}

// A factor an element: multiplied here, and by 1 where it is encoded, which is exact.
template <class F>
__device__ __forceinline__ Codes<F> encode_columns(const ShardEntry& e, const MatrixScale& matrix,
                                                   Unit<float> unit, std::uint32_t row,
                                                   std::uint32_t col) {
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    const std::uint32_t at = min(col + i, e.cols - 1);
    const BlockScale block =
        block_scale<F>(e.rule, e.rounding, matrix, __ldg(e.amaxes + e.cell(row, at)));
    const bool zero = e.rule == ScaleRule::kNvfp4 && block.code == 0;
    const float v = zero ? 0.0f : unit.v[i] * block.factor;
    unit.v[i] = F::kBits == 4 && v != v ? F::kMax : v;  // E2M1 has no NaN: +6
  }
  return encode_with<F>(unit, {1.0f, false, false, false});
}

template <class F>
__device__ __forceinline__ Codes<F> encode_master(const ShardEntry& e, const MatrixScale& matrix,
                                                  const Unit<float>& unit, std::uint32_t row,
                                                  std::uint32_t col) {
  if (e.width_log2 == 0) return encode_columns<F>(e, matrix, unit, row, col);
  const std::uint32_t amax = __ldg(e.amaxes + e.cell(row, col));
  const BlockScale block = block_scale<F>(e.rule, e.rounding, matrix, amax);
  const bool zero = e.rule == ScaleRule::kNvfp4 && block.code == 0;
  return encode_with<F>(unit, {block.factor, zero, e.delayed, block.is_ordinary});
}

// A byte of two codes, of which one may be another shard's.
__device__ __forceinline__ void store_pair(const ShardEntry& e, std::uint8_t* to, unsigned pair,
                                           std::uint32_t col, const Inside& in, int i) {
  const unsigned mask =
      (i >= in.low && i < in.high ? 0x0Fu : 0u) | (i + 1 >= in.low && i + 1 < in.high ? 0xF0u : 0u);
  if (mask == 0) return;
  const bool ends_row = col + i + 1 >= e.cols;  // an odd row's last nibble is nobody's
  const bool keeps = e.keeps_neighbours && mask != 0xFF && !ends_row;
  *to = static_cast<std::uint8_t>((pair & mask) | (keeps ? *to & ~mask : 0u));
}

template <class F>
__device__ __forceinline__ void store_wire(const ShardEntry& e, Codes<F> codes, std::uint32_t row,
                                           std::uint32_t col, const Inside& in) {
  std::uint8_t* to = e.codes + (std::int64_t{row} * e.pitch + col * F::kBits / 8 - e.first_byte);
  constexpr int kBytes = kUnit * F::kBits / 8;
  const auto address = reinterpret_cast<std::uintptr_t>(to);
  if (in.all() && address % kBytes == 0) return store_unit<F>(to, 0, codes);
  if (in.all() && address % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) reinterpret_cast<std::uint32_t*>(to)[i] = codes.w[i];
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kUnit; i += 8 / F::kBits, ++to) {
    const unsigned code = codes[0];
    codes.pop();
    if constexpr (F::kBits == 8) {
      if (i >= in.low && i < in.high) *to = static_cast<std::uint8_t>(code);
    } else {
      store_pair(e, to, code | codes[0] << 4, col, in, i);
      codes.pop();
    }
  }
}

template <class F>
__global__ void __launch_bounds__(kThreads, 3)
    cast_of_shards(const __grid_constant__ TableView<ShardEntry> table) {
  __shared__ ShardEntry e;
  const TileOfShard tile = tile_of(e, find_entry(table, e));
  const std::uint32_t col = tile.unit_col();
  Inside in = inside(e, tile.unit_row(0), col);
  Unit<float> unit = load_master(e, tile.unit_row(0), col, in);
  const MatrixScale matrix = scale_of_tensor<F>(e);
#pragma unroll 1
  for (int i = 0; i < kPasses; ++i) {
    const Inside now = in;
    const Unit<float> values = unit;
    if (i + 1 < kPasses) {  // on its way meanwhile
      in = inside(e, tile.unit_row(i + 1), col);
      unit = load_master(e, tile.unit_row(i + 1), col, in);
    }
    if (!now.any()) continue;
    const std::uint32_t row = tile.unit_row(i);
    store_wire<F>(e, encode_master<F>(e, matrix, values, row, col), row, col, now);
  }
}

// ---- Launches ------------------------------------------------------------------------------------
int log2_of(std::int64_t cell, std::int64_t all) {
  if (cell == 1) return 0;
  return cell == 16 ? 4 : cell == 32 ? 5 : cell == 128 && all != 1 ? 7 : kAll;
}

ShardEntry entry_of(const PartialCast& cast, const AmaxGrid& grid) {
  MINIFLOAT_CHECK(
      cast.rows < (std::int64_t{1} << 31) - kTile && cast.cols < (std::int64_t{1} << 31) - kTile,
      "partial_cast: expected less than 2^31 rows and columns, got ", cast.rows, " x ", cast.cols);
  const Spec& spec = cast.spec;
  const bool has_blocks = spec.has_blocks();
  ShardEntry e = {};
  e.master = cast.master, e.amaxes = cast.amaxes, e.codes = cast.codes;
  e.scale = cast.scale, e.amax = cast.amax;
  e.begin = cast.shard.begin, e.end = cast.shard.end, e.first_byte = cast.first_byte;
  e.rows = static_cast<std::uint32_t>(cast.rows), e.cols = static_cast<std::uint32_t>(cast.cols);
  e.pitch = spec.elements == Elements::kE2m1 ? ceil_div(e.cols, 2u) : e.cols;
  e.grid_rows = static_cast<std::uint32_t>(grid.rows);
  e.grid_cols = static_cast<std::uint32_t>(grid.cols);
  e.height_log2 = has_blocks || grid.rows > 1 ? log2_of(grid.height, grid.rows) : kAll;
  e.width_log2 = has_blocks || grid.cols > 1 ? log2_of(grid.width, grid.cols) : kAll;
  e.rule = spec.rule, e.rounding = spec.scale_rounding;
  e.has_tensor_amax = grid.has_tensor_amax;
  e.delayed = spec.delayed, e.columnwise = cast.columnwise;
  e.is_bf16 = cast.dtype == DType::kBFloat16;
  e.rounds = !e.is_bf16 && cast.compute == DType::kBFloat16;
  e.keeps_neighbours = cast.keeps_neighbours;
  return e;
}

void add_shard(Table<ShardEntry>& table, const PartialCast& cast, ShardEntry e) {
  const Span rows = FlatShard{cast.cols, cast.shard}.block_rows(kTile);
  e.across = ceil_div(e.cols, std::uint32_t{kTile});
  e.first_tile_row = static_cast<std::uint32_t>(rows.begin);
  table.add(e, rows.size() * e.across);
}
void add_grid(Table<ShardEntry>& table, ShardEntry e) {
  e.across = ceil_div(e.grid_cols, kCells);
  table.add(e, std::int64_t{e.across} * ceil_div(e.grid_rows, kCells));
}

template <class Kernel>
void launch(Kernel kernel, const Table<ShardEntry>& table, const Execution& execution) {
  if (table.empty()) return;
  const Scratch scratch(round_up<std::size_t>(table.bytes(), 16), execution);
  const auto view = table.send_to(scratch.as<std::uint8_t>(), stream_of(execution));
  kernel<<<table.grid("partial_cast"), kThreads, 0, stream_of(execution)>>>(view);
  check_launch("partial_cast");
}

// Casts into one element format. Scales last: under +delayed codes are made with the amax that they replace.
template <class F>
void cast_elements(std::span<const PartialCast> casts, Elements elements,
                   const Execution& execution) {
  Table<ShardEntry> shards, grids;
  for (const PartialCast& cast : casts) {
    if (cast.spec.elements != elements) continue;
    const AmaxGrid grid = amax_grid(cast.spec, cast.columnwise, cast.rows, cast.cols);
    const ShardEntry e = entry_of(cast, grid);
    add_shard(shards, cast, e);
    add_grid(grids, e);
  }
  launch(cast_of_shards<F>, shards, execution);
  launch(scales_of_weights<F>, grids, execution);
}

}  // namespace

void partial_amax(std::span<const PartialCast> casts, const Execution& execution) {
  Table<ShardEntry> shards;
  for (const PartialCast& cast : casts)
    add_shard(shards, cast,
              entry_of(cast, amax_grid(cast.spec, cast.columnwise, cast.rows, cast.cols)));
  launch(amax_of_shards, shards, execution);
}

void partial_cast(std::span<const PartialCast> casts, const Execution& execution) {
  cast_elements<E4M3>(casts, Elements::kE4m3, execution);
  cast_elements<E5M2>(casts, Elements::kE5m2, execution);
  cast_elements<E2M1>(casts, Elements::kE2m1, execution);
}

}  // namespace minifloat::cuda
