// A preset cast of one direction of a tile, of a matrix or of a group (groups.cuh).
#pragma once

#include <algorithm>

#include "cuda/quantize/preset.cuh"

namespace minifloat::cuda {

// The place of a tile in one direction's operand. Columns are in vec16s.
struct PresetTile {
  std::uint32_t part;       // the matrix or group
  std::uint32_t all;        // its first row among the rows that have an amax each
  std::uint32_t line;       // its first row in the buffers
  std::uint32_t col;        // its first column in the buffers
  std::uint32_t first_col;  // the first column of its group
  // Of groups alone: the rows and columns that are stored. `first`: of the tile's rows, or of its
  // columns in the transpose; `line` and `all` are those of row `first`.
  std::uint32_t first, rows, vecs;
};
template <bool kTransposed>
__device__ __forceinline__ PresetTile tile_of_matrix(const KernelOperand& plan,
                                                     const TilePlace& tile) {
  const std::uint32_t row = tile.batch * plan.rows + (kTransposed ? tile.col : tile.row);
  return {tile.batch, row, row, (kTransposed ? tile.row : tile.col) / kVec, 0, 0, 0, 0};
}
template <bool kTransposed>
__device__ __forceinline__ PresetTile tile_of_group(const KernelOperand& plan,
                                                    const TilePart& part) {
  const TilePlace& tile = part.tile;
  if constexpr (kTransposed) {
    const std::uint32_t first_col = part.first_col / kVec;
    return {tile.batch, tile.batch * plan.rows + tile.col,
            tile.col,   first_col + tile.row / kVec - part.skip / kVec,
            first_col,  part.skip / kVec,
            kTile,      (part.cols - tile.row + part.skip) / kVec};
  } else {
    const std::uint32_t row = part.begin + tile.row;
    return {tile.batch,
            row,
            row,
            tile.col / kVec,
            0,
            part.skip,
            static_cast<std::uint32_t>(part.x.rows) - tile.row,
            kVecColumns};
  }
}

// Returns the log2 of the lanes that share a row of the transpose: fewer at the end of a group,
// where a tile has few columns, if the block of a scale needs no more.
template <class C>
__device__ __forceinline__ unsigned lanes_log2_of(std::uint32_t vecs) {
  if (C::kBlocks && C::kVecsLog2 == kVecColumnsLog2) return kVecColumnsLog2;
  return vecs > 4 ? kVecColumnsLog2 : vecs > 2 ? 2 : 1;
}

// Casts one direction of a tile.   kHasAmaxes: `amaxes_2d` holds the amaxes of the 2D blocks,
// computed by the other direction; kInGroup: of a group; kHasEdge: a part of the tile may lie
// outside of it
template <class C, bool kTransposed, bool kHasAmaxes, bool kInGroup, bool kHasEdge = kInGroup,
          class T>
__device__ __forceinline__ void cast_preset_tile(const KernelOperand& plan, const Whole& whole,
                                                 const SharedTile<T>& shared,
                                                 const PresetTile& tile, std::uint32_t* amaxes_2d) {
  using F = typename C::F;
  constexpr bool kHasIds = kInGroup && !kTransposed;
  std::uint32_t largest = 0;
  if constexpr (C::kIsBlock2d && !kHasAmaxes)
    amax_of_blocks_2d<kTransposed>(plan, shared, amaxes_2d,
                                   [](const Vec16<T>& vec) { return vec.amax(); });
  const MatrixScale scale = scale_of_whole<C>(plan, whole, tile.part);
  const unsigned lanes_log2 =
      kHasEdge && kTransposed ? lanes_log2_of<C>(tile.vecs) : unsigned{kVecColumnsLog2};
  const std::uint32_t vec_col = threadIdx.x % (1u << lanes_log2);
  const std::uint32_t col = tile.col + vec_col;
  std::uint8_t* const codes =
      plan.codes + std::uint64_t{tile.line} * plan.code_pitch + col * C::kCodeBytes;
  const bool is_first_col = col % (1 << C::kVecsLog2) == 0;  // of a block
  // Swizzled, the index of the first row's scale and that of a row in the tile add up.
  const bool is_swizzled = C::kMaySwizzle && plan.swizzled;
  const std::uint64_t first_scale =
      is_swizzled
          ? swizzled_index(tile.line, col >> C::kVecsLog2, plan.scale_cols)
          : std::uint64_t{tile.line >> C::kHeightLog2} * plan.scale_cols + (col >> C::kVecsLog2);
  const auto cast = [&](const auto& vec, unsigned tile_row) {
    bool is_stored = true;
    if constexpr (kHasEdge && kTransposed) is_stored = vec_col >= tile.first && vec_col < tile.vecs;
    if constexpr (kHasEdge && !kTransposed) {
      constexpr unsigned kRowsAtOnce = kThreads / kVecColumns;
      const unsigned first_at_once = tile_row / kRowsAtOnce * kRowsAtOnce;
      if (first_at_once >= tile.first + tile.rows) return;  // the whole block
      is_stored = tile_row >= tile.first && tile_row - tile.first < tile.rows;
      tile_row = is_stored ? tile_row - tile.first : 0;
    }
    const auto transformed = transform_preset<C>(vec);
    [[maybe_unused]] const std::uint32_t row = tile.all + tile_row;
    std::uint32_t amax = 0;
    if constexpr (C::kIsBlock2d) {
      amax = amaxes_2d[block_2d_of(plan, tile_row, vec_col, kHasAmaxes)];
    } else if constexpr (C::kBlocks) {
      amax = amax_of_lanes(transformed.amax, C::kVecsLog2);
    } else if constexpr (C::kRule == ScaleRule::kRow) {
      const float active_amax = is_stored ? plan.amax[row] : 0.0f;
      amax = magnitude_bits(active_amax);
      if (col == tile.first_col && is_stored) store_whole<F>(plan, row, active_amax);
    }
    const BlockScale block = block_scale<F>(C::kRule, C::kRounding, scale, amax);
    if constexpr (C::kBlocks && !C::kAsFp8)
      if (is_first_col && is_stored && (is_swizzled || tile_row % (1 << C::kHeightLog2) == 0))
        store_scale_at(plan, C::kRule, block,
                       first_scale + (is_swizzled ? swizzled_index(tile_row, 0, 1)
                                                  : std::uint64_t{tile_row >> C::kHeightLog2} *
                                                        plan.scale_cols));
    const float row_factor = fp8_row_factor<C>(plan, scale, row);
    if constexpr (C::kAsFp8)
      if (col == 0) store_fp8_row_scale(plan, scale, row, row_factor);
    RandomBits bits = {};
    if constexpr (C::kStochastic)
      bits = random_bits_at(whole, counter_row<kHasIds>(plan, whole, row), col - tile.first_col);
    if (is_stored)
      encode_and_store<C>(
          plan, transformed, block, bits, codes + std::uint64_t{tile_row} * plan.code_pitch,
          std::uint64_t{tile.line + tile_row} * (plan.padded / kVec) + col, row_factor);
    if constexpr (kFindsCurrentAmax<C>)
      if (plan.current_amax) largest = max(largest, transformed.vec.amax());
  };
  shared.template each_vec<kTransposed>(cast, lanes_log2);
  if constexpr (kFindsCurrentAmax<C>) raise_current_amax(plan, tile.part, largest);
}

// Casts a tile in the directions that are wanted.   kHasEdge: a part of it may lie outside its
// group
template <class Row, class Col, bool kHasEdge>
__device__ __forceinline__ void cast_group_tile(const KernelOperand& row, const KernelOperand& col,
                                                const Whole (&whole)[2],
                                                const SharedTile<Bf16>& shared,
                                                const TilePart& part) {
  if constexpr (!std::is_same_v<Row, Absent>)
    if (is_wanted(row))
      cast_preset_tile<Row, false, false, true, kHasEdge>(row, whole[0], shared,
                                                          tile_of_group<false>(row, part), nullptr);
  if constexpr (!std::is_same_v<Col, Absent>)
    cast_preset_tile<Col, true, false, true, kHasEdge>(col, whole[1], shared,
                                                       tile_of_group<true>(col, part), nullptr);
}

// Casts a tile of a group, in shared memory, in the directions that are wanted.
template <class Row, class Col>
__device__ __forceinline__ void cast_group_tile(const KernelOperand& row, const KernelOperand& col,
                                                const Whole (&whole)[2],
                                                const SharedTile<Bf16>& shared,
                                                const TilePart& part) {
  if (part.skip == 0 && part.tile.row + kTile <= part.x.rows)
    cast_group_tile<Row, Col, false>(row, col, whole, shared, part);
  else
    cast_group_tile<Row, Col, true>(row, col, whole, shared, part);
}

// Returns the most rows of tiles that end at lines: each group may begin and end within a tile.
inline std::int64_t most_tiles_of_groups(const QuantizeArgs& args) {
  return ceil_div<std::int64_t>(args.col.padded, kTile) + args.groups.count;
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

}  // namespace minifloat::cuda
