// The swizzled layout of scales (core/swizzle.h). A block gathers up to 16 tiles of 128 x 4 scales
// in shared memory, in the order of the layout, and writes them with their padding:
//
//     whole, groups along rows    the tiles are neighbours in the layout
//     groups along columns        each tile has a place of its own
//
// The padding after the last group is written as well, so that nothing else clears it.
//
//     bytes a scale: 1 read, 1 written
#include <algorithm>

#include "cuda/backend.h"
#include "cuda/common/launch.h"
#include "cuda/common/reduce.cuh"
#include "minifloat/core/groups.h"
#include "minifloat/core/swizzle.h"

namespace minifloat::cuda {
namespace {

inline constexpr int kTileBytes = static_cast<int>(kSwizzleTileRows * kSwizzleTileCols);
inline constexpr int kWordsOfTile = kTileBytes / 4;
inline constexpr int kChunksOfTile = kTileBytes / 16;
inline constexpr int kTilesOfBlock = 16;
inline constexpr int kTileRows = static_cast<int>(kSwizzleTileRows);

struct SwizzleArgs {
  ScaleMatrix shape;
  std::int64_t bytes;  // of a swizzled matrix
  const std::uint8_t* in;
  std::uint8_t* out;
  std::uint32_t tiles_of_row, rows_of_tiles;  // of the layout
  bool has_aligned_rows;                      // rows of scales start at multiples of 16 bytes
  bool is_in_aligned, is_out_aligned;         // to 4 and to 16 bytes
};

// Returns scales [col, end) of a row, four at most; zeros past the end.
__device__ __forceinline__ std::uint32_t load_scales(const SwizzleArgs& args, std::int64_t row,
                                                     std::int64_t col, std::int64_t end) {
  const std::int64_t at = row * args.shape.cols + col;
  const std::uint8_t* from = args.in + at;
  const auto odd = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(from) % 4);
  if (args.is_in_aligned && end - col >= 4 && at - odd + 8 <= args.shape.rows * args.shape.cols) {
    const auto* words = reinterpret_cast<const std::uint32_t*>(from - odd);
    const std::uint32_t low = __ldg(words);
    return odd == 0 ? low : __funnelshift_r(low, __ldg(words + 1), 8 * odd);
  }
  std::uint32_t word = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (k < end - col) word |= static_cast<std::uint32_t>(from[k]) << (k * 8);
  return word;
}

// Returns the word of scale row `r` of a tile.
__device__ __forceinline__ int word_of_row(int r) { return r % 32 * 4 + r / 32; }

// Stores chunk `i` of 16 bytes of the layout, up to its end.
__device__ __forceinline__ void store_chunk(const SwizzleArgs& args, std::int64_t i,
                                            const uint4& chunk) {
  const std::int64_t left = args.bytes - 16 * i;
  if (args.is_out_aligned && left >= 16) {
    reinterpret_cast<uint4*>(args.out)[i] = chunk;
    return;
  }
  const std::uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int k = 0; k < 16; ++k)
    if (k < left) args.out[16 * i + k] = static_cast<std::uint8_t>(words[k / 4] >> (k % 4 * 8));
}

// ---- Neighbouring tiles -------------------------------------------------------------------------
// Tiles of the layout, and the scales of theirs: rows [row, end_row).
struct TileRun {
  std::int64_t first;  // the number of the first tile in the layout
  std::int64_t row, end_row;
  std::uint32_t tile_col;
};
__device__ __forceinline__ void swizzle_run(const SwizzleArgs& args, const TileRun& run) {
  constexpr int kChunks = kTilesOfBlock / 4;  // of 16 bytes
  __shared__ __align__(16) std::uint32_t words[kTilesOfBlock * kWordsOfTile];
  const std::int64_t cols = args.shape.cols;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kTileRows * kChunks; i += kThreads) {
    const int r = i / kChunks, chunk = i % kChunks;
    const std::int64_t row = run.row + r;
    const std::int64_t col =
        static_cast<std::int64_t>(run.tile_col) * kSwizzleTileCols + chunk * 16;
    std::uint32_t four[4] = {};
    if (row < run.end_row && args.has_aligned_rows && col < cols) {
      const uint4 w = __ldg(reinterpret_cast<const uint4*>(args.in + row * cols + col));
      four[0] = w.x, four[1] = w.y, four[2] = w.z, four[3] = w.w;
    } else if (row < run.end_row) {
#pragma unroll
      for (int t = 0; t < 4; ++t) four[t] = load_scales(args, row, col + 4 * t, cols);
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) words[(chunk * 4 + t) * kWordsOfTile + word_of_row(r)] = four[t];
  }
  __syncthreads();
  const int tiles =
      static_cast<int>(min(args.tiles_of_row - run.tile_col, std::uint32_t{kTilesOfBlock}));
  for (int i = static_cast<int>(threadIdx.x); i < tiles * kChunksOfTile; i += kThreads)
    store_chunk(args, run.first * kChunksOfTile + i, reinterpret_cast<const uint4*>(words)[i]);
}

__global__ void __launch_bounds__(kThreads, 6)
    swizzle_whole(const __grid_constant__ SwizzleArgs all) {
  const std::uint32_t across = (all.tiles_of_row + kTilesOfBlock - 1) / kTilesOfBlock;
  const std::uint32_t of_rows = blockIdx.x / across, e = of_rows / all.rows_of_tiles;
  const std::uint32_t tile_row = of_rows - e * all.rows_of_tiles;
  const std::uint32_t tile_col = (blockIdx.x - of_rows * across) * kTilesOfBlock;
  SwizzleArgs args = all;
  args.in += static_cast<std::int64_t>(e) * args.shape.rows * args.shape.cols;
  args.out += e * args.bytes;
  swizzle_run(args, {static_cast<std::int64_t>(tile_row) * args.tiles_of_row + tile_col,
                     std::int64_t{tile_row} * kTileRows, args.shape.rows, tile_col});
}

// ---- Groups -------------------------------------------------------------------------------------
// A group of scales: rows or columns [begin, end), and its tiles along them.
struct ScaleGroup {
  std::int32_t begin, end;
  std::uint32_t first_tile, tiles;
};
// Calls body(group) with a group a lane, 32 groups at a time, until their tiles reach `until`.
// Returns the tiles of the groups that were passed. Ends are taken as build_group_table takes them.
template <class Body>
__device__ __forceinline__ std::uint32_t each_group(const ScaleMatrix& m, std::uint32_t until,
                                                    Body body) {
  const bool along_m = m.kind == ScaleGroups::kAlongM;
  const auto length = static_cast<std::int32_t>(along_m ? m.rows : m.cols);
  const auto size = static_cast<std::int32_t>(along_m ? kSwizzleTileRows : kSwizzleTileCols);
  const auto count = static_cast<std::uint32_t>(m.groups);
  std::int32_t before = 0;
  std::uint32_t tiles = 0;
  for (std::uint32_t first = 0; first < count && tiles < until; first += 32) {
    const std::uint32_t g = first + threadIdx.x % 32;
    const std::int32_t end =
        warp_prefix_max(group_end(g < count ? __ldg(m.offsets + g) : 0, before, length));
    std::int32_t begin = __shfl_up_sync(kAllLanes, end, 1);
    if (threadIdx.x % 32 == 0) begin = before;
    const std::int32_t of_group = ceil_div(end - begin, size);
    const std::int32_t up_to = warp_prefix_sum(of_group);
    body(ScaleGroup{begin, end, tiles + static_cast<std::uint32_t>(up_to - of_group),
                    static_cast<std::uint32_t>(of_group)});
    before = __shfl_sync(kAllLanes, end, 31);
    tiles += static_cast<std::uint32_t>(__shfl_sync(kAllLanes, up_to, 31));
  }
  return tiles;
}

__global__ void __launch_bounds__(kThreads)
    swizzle_groups_of_rows(const __grid_constant__ SwizzleArgs args) {
  const std::uint32_t across = (args.tiles_of_row + kTilesOfBlock - 1) / kTilesOfBlock;
  const std::uint32_t tile_row = blockIdx.x / across;
  const std::uint32_t tile_col = (blockIdx.x - tile_row * across) * kTilesOfBlock;
  TileRun run = {static_cast<std::int64_t>(tile_row) * args.tiles_of_row + tile_col, 0, 0,
                 tile_col};
  each_group(args.shape, tile_row + 1, [&](const ScaleGroup& group) {
    const std::uint32_t in_group = tile_row - group.first_tile;  // past `tiles` where before it
    const std::uint32_t holders = __ballot_sync(kAllLanes, in_group < group.tiles);
    if (holders == 0) return;
    const int lane = __ffs(static_cast<int>(holders)) - 1;
    const std::int32_t row = group.begin + static_cast<std::int32_t>(in_group) * kTileRows;
    run.row = __shfl_sync(kAllLanes, row, lane);
    run.end_row = __shfl_sync(kAllLanes, group.end, lane);
  });
  swizzle_run(args, run);
}

// A tile of a group of columns: columns [col, end), and its number in the layout.
struct ColumnTile {
  std::int64_t place;
  std::int32_t col, end;
};
// Finds tiles [first, first + kTilesOfBlock) of a row of tiles, by one warp. After the last group
// they have no columns.
__device__ __forceinline__ void find_column_tiles(const SwizzleArgs& args, std::uint32_t tile_row,
                                                  std::uint32_t first, ColumnTile* tiles) {
  const std::uint32_t end = min(first + kTilesOfBlock, args.tiles_of_row);
  const auto place = [&](const ScaleGroup& group, std::uint32_t tile) {
    return static_cast<std::int64_t>(group.first_tile) * args.rows_of_tiles +
           static_cast<std::int64_t>(tile_row) * group.tiles + (tile - group.first_tile);
  };
  const std::uint32_t found = each_group(args.shape, end, [&](const ScaleGroup& group) {
    const std::uint32_t group_end = group.first_tile + group.tiles;
    for (std::uint32_t t = max(first, group.first_tile); t < min(end, group_end); ++t)
      tiles[t - first] = {place(group, t),
                          group.begin + static_cast<std::int32_t>(t - group.first_tile) *
                                            static_cast<std::int32_t>(kSwizzleTileCols),
                          group.end};
  });
  if (found >= end) return;
  const ScaleGroup rest = {0, 0, found, args.tiles_of_row - found};
  const std::uint32_t t = max(first, found) + threadIdx.x % 32;
  if (t < end) tiles[t - first] = {place(rest, t), 0, 0};
}

__global__ void __launch_bounds__(kThreads)
    swizzle_groups_of_columns(const __grid_constant__ SwizzleArgs args) {
  constexpr int kTogether = 4;  // tiles of neighbouring lanes
  __shared__ __align__(16) std::uint32_t words[kTilesOfBlock * kWordsOfTile];
  __shared__ ColumnTile tiles[kTilesOfBlock];
  const std::uint32_t tile_row = blockIdx.x % args.rows_of_tiles;
  const std::uint32_t first = blockIdx.x / args.rows_of_tiles * kTilesOfBlock;
  const int count = static_cast<int>(min(args.tiles_of_row - first, std::uint32_t{kTilesOfBlock}));
  if (threadIdx.x < 32) find_column_tiles(args, tile_row, first, tiles);
  __syncthreads();
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kTileRows * kTilesOfBlock; i += kThreads) {
    const int r = i / kTogether % kTileRows;
    const int t = i / (kTogether * kTileRows) * kTogether + i % kTogether;
    const std::int64_t row = std::int64_t{tile_row} * kTileRows + r;
    if (t >= count) continue;
    words[t * kWordsOfTile + word_of_row(r)] =
        row < args.shape.rows ? load_scales(args, row, tiles[t].col, tiles[t].end) : 0;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < count * kChunksOfTile; i += kThreads)
    store_chunk(args, tiles[i / kChunksOfTile].place * kChunksOfTile + i % kChunksOfTile,
                reinterpret_cast<const uint4*>(words)[i]);
  // The layout's bytes past its whole tiles
  const std::int64_t whole = std::int64_t{args.tiles_of_row} * args.rows_of_tiles * kChunksOfTile;
  for (std::int64_t i = whole + blockIdx.x * kThreads + threadIdx.x; 16 * i < args.bytes;
       i += std::int64_t{gridDim.x} * kThreads)
    store_chunk(args, i, {});
}

// ---- Back ---------------------------------------------------------------------------------------
// Returns the place of scale (r, c) of a matrix; -1 past the last group.
__device__ std::int64_t swizzled_place(const ScaleMatrix& m, std::int64_t r, std::int64_t c) {
  if (m.kind == ScaleGroups::kNone) return swizzled_offset(r, c, m.cols);
  const bool along_m = m.kind == ScaleGroups::kAlongM;
  const std::int64_t at = along_m ? r : c;
  const auto length = static_cast<std::int32_t>(along_m ? m.rows : m.cols);
  std::int32_t begin = 0;
  std::int64_t padded = 0;
  for (std::int64_t g = 0; g < m.groups; ++g) {
    const std::int32_t end = group_end(m.offsets[g], begin, length);
    if (at < end)
      return along_m ? swizzled_offset_group_m(padded, r - begin, c, m.cols)
                     : swizzled_offset_group_k(padded, r, c - begin, m.rows, end - begin);
    padded += round_up<std::int64_t>(end - begin, along_m ? kSwizzleTileRows : kSwizzleTileCols);
    begin = end;
  }
  return -1;
}
__global__ void __launch_bounds__(kThreads) unswizzle(const __grid_constant__ SwizzleArgs args) {
  const std::int64_t count = args.shape.rows * args.shape.cols;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= args.shape.batch * count) return;
  const std::int64_t e = i / count, r = (i - e * count) / args.shape.cols,
                     c = (i - e * count) % args.shape.cols;
  const std::int64_t place = swizzled_place(args.shape, r, c);
  if (place >= 0) args.out[i] = args.in[e * args.bytes + place];
}

// Returns the arguments of a launch: the layout's whole tiles, of groups as of the longest layout.
SwizzleArgs args_of(const ScaleMatrix& shape, const std::uint8_t* in, std::uint8_t* out) {
  const bool along_m = shape.kind == ScaleGroups::kAlongM,
             along_k = shape.kind == ScaleGroups::kAlongK;
  const std::int64_t rows = shape.rows + (along_m ? kSwizzleTileRows * shape.groups : 0),
                     cols = shape.cols + (along_k ? kSwizzleTileCols * shape.groups : 0);
  const std::int64_t tiles_of_row =
      along_k ? cols / kSwizzleTileCols : ceil_div(cols, kSwizzleTileCols);
  const auto from = reinterpret_cast<std::uintptr_t>(in),
             to = reinterpret_cast<std::uintptr_t>(out);
  return {shape,
          shape.swizzled_bytes(),
          in,
          out,
          static_cast<std::uint32_t>(tiles_of_row),
          static_cast<std::uint32_t>(ceil_div(rows, kSwizzleTileRows)),
          shape.cols % 16 == 0 && from % 16 == 0,
          from % 4 == 0,
          to % 16 == 0};
}

}  // namespace

void swizzle_scales(const ScaleMatrix& shape, const std::uint8_t* scale, std::uint8_t* out,
                    const Execution& execution) {
  const SwizzleArgs args = args_of(shape, scale, out);
  if (shape.batch * args.bytes == 0) return;
  const std::int64_t across =
      std::max<std::int64_t>(ceil_div<std::int64_t>(args.tiles_of_row, kTilesOfBlock), 1);
  const unsigned grid = grid_of(shape.batch * args.rows_of_tiles * across, "swizzle_scales");
  const auto kernel = shape.kind == ScaleGroups::kNone     ? swizzle_whole
                      : shape.kind == ScaleGroups::kAlongM ? swizzle_groups_of_rows
                                                           : swizzle_groups_of_columns;
  kernel<<<grid, kThreads, 0, cuda_stream(execution)>>>(args);
  check_launch("swizzle_scales");
}

void unswizzle_scales(const ScaleMatrix& shape, const std::uint8_t* swizzled, std::uint8_t* out,
                      const Execution& execution) {
  const std::int64_t threads = shape.batch * shape.rows * shape.cols;
  if (threads == 0) return;
  unswizzle<<<grid_of(ceil_div<std::int64_t>(threads, kThreads), "unswizzle_scales"), kThreads, 0,
              cuda_stream(execution)>>>(args_of(shape, swizzled, out));
  check_launch("unswizzle_scales");
}

}  // namespace minifloat::cuda
