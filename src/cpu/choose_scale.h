// The scales of a tile's blocks under a rule that reads values (core/scale_rule.h): the errors of
// both scales of each block, and the choice, as the sign bit of the block's amax.
#pragma once

#include <cstdint>

#include "block_scale.h"
#include "encode_fast.h"
#include "minifloat/core/scale_rule.h"
#include "tile.h"

namespace minifloat::cpu {

inline constexpr std::int64_t kSide = 16;  // of a block

// Computes the squared errors of one tile row, (kTileCols).   factor, scale: one an element
template <class F, class T>
MINIFLOAT_INLINE void square_errors(const TensorScale& tensor, const T* __restrict row,
                                    const float* __restrict factor, const float* __restrict scale,
                                    float* __restrict squares) {
  for (std::int64_t c = 0; c < kTileCols; ++c) {
    const float x = to_float(row[c]);
    squares[c] = squared_error<F>(tensor, scale[c], encode_nearest<F>(x * factor[c]), x);
  }
}

// Computes the error of each block under the scale in `blocks`, (blocks.rows * blocks.cols).
// is_down: the rows of a 16 x 16 block are columns of the tile.
template <class F, class T>
MINIFLOAT_INLINE void block_errors(const TensorScale& tensor, const TileView<T>& tile,
                                   std::int64_t tile_rows, const TileBlocks& blocks, bool is_down,
                                   float* errors) {
  alignas(64) float factor[kTileCols], scale[kTileCols], squares[kTileCols];
  alignas(64) float lines[kTileCols];  // of a block row: (block, row of the block)
  const std::int64_t height = std::int64_t{1} << blocks.height_log2;
  for (std::int64_t r = 0; r < tile_rows; ++r) {
    const std::int64_t first = blocks.first_of_row(r), of_block = r % height;
    if (of_block == 0)
      for (float& line : lines) line = 0.0f;
    spread_blocks<kSide>(blocks.factor + first, factor);
    spread_blocks<kSide>(blocks.scale + first, scale);
    square_errors<F>(tensor, tile.row(r), factor, scale, squares);
    if (is_down) {
      for (std::int64_t c = 0; c < kTileCols; ++c) lines[c] = lines[c] + squares[c];
    } else {
      for (std::int64_t b = 0; b < kTileCols / kSide; ++b) {
        float sum = 0.0f;
        for (std::int64_t i = 0; i < kSide; ++i) sum = sum + squares[b * kSide + i];
        lines[b * kSide + of_block] = sum;
      }
    }
    if (of_block + 1 < height && r + 1 < tile_rows) continue;
    for (std::int64_t b = 0; b < kTileCols / kSide; ++b)
      errors[first + b] = height == 1 ? lines[b * kSide] : add_rows(lines + b * kSide);
  }
}

template <class F, class T>
MINIFLOAT_INLINE void choose_scales(const OperandPlan& plan, const TileRange& range,
                                    const TileView<T>& tile, TileBlocks& blocks) {
  const Spec& spec = plan.operand.spec;
  const TensorScale& tensor = plan.tensor[range.batch];
  const bool is_down = plan.columnwise && spec.transform == 0 && spec.block_rows > 1;
  alignas(64) float errors[2][TileBlocks::kMaxBlocks];
  for (int second = 0; second < 2; ++second) {
    if (second)
      for (std::uint32_t& amax : blocks.amax) amax |= kSecondScale;
    block_scales<F>(plan, range.batch, blocks);
    block_errors<F>(tensor, tile, range.rows, blocks, is_down, errors[second]);
  }
  for (std::int64_t b = 0; b < blocks.rows * blocks.cols; ++b)
    if (!takes_second(errors[0][b], errors[1][b])) blocks.amax[b] &= ~kSecondScale;
}

}  // namespace minifloat::cpu
