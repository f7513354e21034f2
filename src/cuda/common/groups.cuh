// Groups of rows in kernels (core/groups.h). A tile never crosses the end of a group: each group
// has tiles of its own, at least one, and is cast as a matrix of its own.
//
//     rows of tiles     | group 0 | 1 |  group 2  | past the last group
//                       0         |   |           |
//                       boundaries under the unit kTile, in tiles
//
// A launch has tiles for groups of any sizes. Blocks past the last group leave at once.
//
// Casts that write the columnwise operand take tiles that end at lines instead: multiples of kTile
// columns of its buffers. So they write whole sectors of memory wherever a group begins. The first
// and the last tile of a group may be a part of one:
//
//     columns       0        kTile      2 kTile
//     groups        | group 0   | 1 |   group 2 …
//     tiles         |  0   |  1 | 2 | 3 |  4  …     group e has those from P_e / kTile + e on
#pragma once

#include <cstdint>

#include "cuda/common/tile.cuh"
#include "minifloat/groups.h"

namespace minifloat::cuda {

static_assert(is_group_unit(kTile));

// A table of groups as a kernel's argument: boundaries, (count + 1) each.
struct DeviceGroups {
  const std::int32_t* rows = nullptr;   // among the rows of x; null: there are no groups
  const std::int32_t* tiles = nullptr;  // under the unit kTile
  const std::int32_t* cols = nullptr;   // of the columnwise operand
  std::uint32_t count = 0;

  MINIFLOAT_HD explicit operator bool() const { return rows != nullptr; }
};
inline DeviceGroups device_groups(const GroupTable& groups) {
  if (!groups) return {};
  return {groups.of_rows(), groups.under(kTile), groups.under(groups.unit),
          static_cast<std::uint32_t>(groups.count)};
}

// Returns the end of the last group, on the device; null: there are no groups.
inline const std::int32_t* last_end_of(const GroupTable& groups) {
  return groups ? groups.of_rows() + groups.count : nullptr;
}

// Returns the tiles of x; of groups, enough for any ends.
inline Tiles tiles_of(const KernelInput& x, const DeviceGroups& groups) {
  Tiles tiles = tiles_of(x);
  tiles.down = Divisor(ceil_div<std::int64_t>(x.rows, kTile) + groups.count);
  return tiles;
}

// ---- Search -------------------------------------------------------------------------------------
// Every warp searches by itself, 32 ways at a time.   boundary(i): the beginning of group i
__device__ __forceinline__ std::uint32_t load_boundary(const std::int32_t* boundaries,
                                                       std::uint32_t i) {
  return static_cast<std::uint32_t>(__ldg(boundaries + i));
}
// Returns the last lane for which `is_before` holds; it holds for the first.
__device__ __forceinline__ std::uint32_t last_lane(bool is_before) {
  return 31 -
         static_cast<std::uint32_t>(__clz(static_cast<int>(__ballot_sync(kAllLanes, is_before))));
}
// At most 32 groups, among which is the last that begins at `at` or before.
struct Narrowed {
  std::uint32_t first, count;
};
template <class Boundary>
__device__ __forceinline__ Narrowed narrow_to_warp(Boundary boundary, std::uint32_t count,
                                                   std::uint32_t at) {
  const std::uint32_t lane = threadIdx.x % 32;
  std::uint32_t first = 0;
  while (count > 32) {
    const std::uint32_t step = (count + 31) / 32, i = lane * step;
    const std::uint32_t last = last_lane(i < count && boundary(first + min(i, count - 1)) <= at);
    first += last * step;
    count = min(step, count - last * step);
  }
  return {first, count};
}
// Returns group_at of a row, by the whole warp.
__device__ __forceinline__ std::uint32_t find_group_of_row(const DeviceGroups& groups,
                                                           std::uint32_t row) {
  const auto begin = [&](std::uint32_t i) { return load_boundary(groups.rows, i); };
  const Narrowed some = narrow_to_warp(begin, groups.count, row);
  const std::uint32_t lane = threadIdx.x % 32, i = some.first + min(lane, some.count - 1);
  return some.first + last_lane(lane < some.count && begin(i) <= row);
}

// ---- By rows ------------------------------------------------------------------------------------
// Limits layout.end_row to the end of the last group. Returns whether the block has rows before it.
template <int kVecsOfThread = kVecsOfRows>
__device__ __forceinline__ bool end_at_last_group(const DeviceGroups& groups, RowVecs& layout) {
  if (!groups) return true;
  layout.end_row = min(layout.end_row, load_boundary(groups.rows, groups.count));
  return vec_place(layout, blockIdx.x * (kThreads * kVecsOfThread)).all < layout.end_row;
}
__device__ __forceinline__ std::uint32_t group_of_row(const DeviceGroups& groups,
                                                      std::uint32_t row) {
  return static_cast<std::uint32_t>(
      group_at(groups.rows, static_cast<int>(groups.count), static_cast<std::int32_t>(row)));
}

// ---- By tiles -----------------------------------------------------------------------------------
// A group, and the places of its rows and of its columns in the columnwise operand.
struct GroupPlace {
  std::uint32_t group, first_tile;  // first_tile: as passed to find_group
  std::uint32_t begin, rows, first_col, cols;
};
// Returns the group of tile `at`, before the last group's end.   first_tile_of(i): group i's first
template <class FirstTile>
__device__ __forceinline__ GroupPlace find_group(const DeviceGroups& groups, std::uint32_t at,
                                                 FirstTile first_tile_of) {
  const Narrowed some = narrow_to_warp(first_tile_of, groups.count, at);
  const std::uint32_t lane = threadIdx.x % 32, i = some.first + min(lane, some.count - 1);
  const std::uint32_t first_tile = first_tile_of(i), begin = load_boundary(groups.rows, i),
                      end = load_boundary(groups.rows, i + 1), col = load_boundary(groups.cols, i),
                      end_col = load_boundary(groups.cols, i + 1);
  const std::uint32_t last = last_lane(lane < some.count && first_tile <= at);
  const auto of_last = [&](std::uint32_t value) { return __shfl_sync(kAllLanes, value, last); };
  return {some.first + last,    of_last(first_tile), of_last(begin),
          of_last(end - begin), of_last(col),        of_last(end_col - col)};
}

// Returns the group of the tiles that begin at row `at` of all tiles, before the last group's end.
__device__ __forceinline__ GroupPlace find_group(const DeviceGroups& groups, std::uint32_t at) {
  return find_group(groups, at, [&](std::uint32_t i) { return load_boundary(groups.tiles, i); });
}

// A tile, and the matrix or group that contains it.
struct TilePart {
  KernelInput x;   // the batch, or the group
  TilePlace tile;  // of x; batch: the matrix, or the group's number
  bool is_group;
  std::uint32_t begin, first_col, cols;  // of a group: GroupPlace's
  std::uint32_t skip = 0;                // the rows of the tile before the group's: multiple of 16
};
// Returns the part of x for a tile of a group, whose row is not yet the group's.
template <class T>
__device__ __forceinline__ TilePart part_in(const KernelInput& x, const GroupPlace& group,
                                            const TilePlace& tile) {
  TilePart part = {x, tile, true, 0, 0, 0};
  part.x.rows = group.rows;
  if (x.rows_from)
    part.x.rows_from += group.begin;
  else if (group.rows > 0)
    part.x.data = row_at<T>(x, 0, group.begin);
  part.tile.batch = group.group;
  part.begin = group.begin, part.first_col = group.first_col, part.cols = group.cols;
  return part;
}
// Returns the group of tile `tile` of all groups' tiles.
template <class T>
__device__ __forceinline__ TilePart part_of_group(const KernelInput& x, const DeviceGroups& groups,
                                                  const TilePlace& tile) {
  const GroupPlace group = find_group(groups, tile.row);
  TilePart part = part_in<T>(x, group, tile);
  part.tile.row = tile.row - group.first_tile;
  return part;
}

// Returns the most tiles that the groups have in one column of x's tiles.
__device__ __forceinline__ std::uint32_t tiles_of_groups(const DeviceGroups& groups) {
  return load_boundary(groups.cols, groups.count) / kTile + groups.count;
}
// Finds the group of tile `i` among tiles_of_groups, at column `col` of x. Returns false where the
// tile has no columns of the group.
template <class T>
__device__ __forceinline__ bool find_tile_of_groups(const KernelInput& x,
                                                    const DeviceGroups& groups, std::uint32_t i,
                                                    std::uint32_t col, TilePart& part) {
  const GroupPlace group = find_group(
      groups, i, [&](std::uint32_t e) { return load_boundary(groups.cols, e) / kTile + e; });
  part = part_in<T>(x, group, {0, 0, col});
  const std::uint32_t line = (i - group.group) * kTile;
  if (line < group.first_col)
    part.skip = group.first_col - line;
  else
    part.tile.row = line - group.first_col;
  return part.tile.row < group.cols;
}
// Finds the part of x for tile `tile` of a launch. Returns false past the last group.
template <class T>
__device__ __forceinline__ bool find_part(const KernelInput& x, const DeviceGroups& groups,
                                          const TilePlace& tile, TilePart& part) {
  part = {x, tile, false, 0, 0, 0};
  if (!groups) return true;
  if (tile.row >= load_boundary(groups.tiles, groups.count)) return false;
  part = part_of_group<T>(x, groups, tile);
  return true;
}

// The rows and columns of an operand's buffers that a matrix or a group takes.
struct Window {
  std::uint32_t rows, cols;  // as read, padding included
  std::uint32_t first;       // the number of its first row among the rows that have an amax each
  std::uint32_t line;        // the first row of the buffers
  std::uint32_t first_col;   // the first column of the buffers
};
// Returns the window of a direction.   rows, padded: of one matrix as read, or of the whole operand
// with groups
template <bool kTransposed>
__device__ __forceinline__ Window window_of(const TilePart& part, std::uint32_t rows,
                                            std::uint32_t padded) {
  const std::uint32_t before = part.tile.batch * rows;
  if (!part.is_group) return {rows, padded, before, before, 0};
  if (kTransposed) return {rows, part.cols, before, 0, part.first_col};
  return {static_cast<std::uint32_t>(part.x.rows), padded, part.begin, part.begin, 0};
}
// Returns the place of a vec16 in a window.
__device__ __forceinline__ Place place_in(const Window& window, std::uint32_t batch,
                                          std::uint32_t row, std::uint32_t col) {
  return {batch, row, window.first + row, col, window.line + row};
}

}  // namespace minifloat::cuda
