// The scales of a tile's blocks under a rule that reads values (core/scale_rule.h): the errors of
// both scales of each block, and the choice, as the sign bit of the block's amax.
//
// The 8 blocks of a tile row, under the first scale and under the second, are 16 lanes. All 16 sums
// advance together, each in its own order:
//
//     squared errors of a tile row (16 lanes, 16 elements)  --transpose-->  (16 elements, 16 lanes)
//     line = 0 + element 0 + element 1 + ... + element 15                   (16 lanes)
#pragma once

#include <cstdint>

#include "block_scale.h"
#include "encode_fast.h"
#include "lanes.h"
#include "minifloat/core/scale_rule.h"
#include "tile.h"

namespace minifloat::cpu {

inline constexpr std::int64_t kSide = 16;                         // of a block
inline constexpr std::int64_t kBlocksPerRow = kTileCols / kSide;  // of a tile
inline constexpr std::int64_t kErrorLanes = 2 * kBlocksPerRow;    // (scale, block)
static_assert(kErrorLanes == kSide, "lanes and elements are transposed as 16 x 16");

// One of the two scales of all blocks of a tile.
struct ScaleChoice {
  alignas(64) float factor[TileBlocks::kMaxBlocks];
  alignas(64) float scale[TileBlocks::kMaxBlocks];
};

// Computes the squared errors of one tile row, (kTileCols).   factor, scale: one an element
// Magnitudes suffice: a code has its element's sign, so that both differences have one magnitude.
template <class F, class T>
MINIFLOAT_INLINE void square_errors(const TensorScale& tensor, const T* __restrict row,
                                    const float* __restrict factor, const float* __restrict scale,
                                    float* __restrict squares) {
  for (std::int64_t c = 0; c < kTileCols; ++c) {
    const float x = bit_cast<float>(magnitude_bits(to_float(row[c])));
    const float d =
        four_over_six_value(round_magnitude<F>(x * factor[c]), scale[c], tensor.amax) - x;
    squares[c] = d * d;
  }
}

// Adds the 16 elements of each lane in order.
//   squares: (kErrorLanes, kSide); sums: (kErrorLanes)
MINIFLOAT_INLINE void add_in_order(const float* __restrict squares, float* __restrict sums) {
  alignas(64) float by_element[kSide * kErrorLanes];
  transpose_16x16(squares, kSide, by_element, kErrorLanes);
  for (std::int64_t lane = 0; lane < kErrorLanes; ++lane) sums[lane] = by_element[lane];
  for (std::int64_t i = 1; i < kSide; ++i)
    for (std::int64_t lane = 0; lane < kErrorLanes; ++lane)
      sums[lane] = sums[lane] + by_element[i * kErrorLanes + lane];
}

// Adds the 16 lines of a 16 x 16 block.
MINIFLOAT_INLINE float add_lines(const float (*lines)[kErrorLanes], std::int64_t lane) {
  float rows[kSide];
  for (std::int64_t i = 0; i < kSide; ++i) rows[i] = lines[i][lane];
  return add_rows(rows);
}

// Computes the errors of each block of the tile under both scales, (2, blocks.rows * blocks.cols).
// is_down: the rows of a 16 x 16 block are columns of the tile.
template <class F, class T>
MINIFLOAT_INLINE void block_errors(const TensorScale& tensor, const TileView<T>& tile,
                                   std::int64_t tile_rows, const TileBlocks& blocks,
                                   const ScaleChoice* choices, bool is_down,
                                   float (*errors)[TileBlocks::kMaxBlocks]) {
  alignas(64) float factor[kTileCols], scale[kTileCols];
  alignas(64) float squares[2 * kTileCols];     // of a tile row: (scale, column)
  alignas(64) float columns[2 * kTileCols];     // their sums down a block, where is_down
  alignas(64) float lines[kSide][kErrorLanes];  // the sums of a block row: (row of the block, lane)
  const std::int64_t height = std::int64_t{1} << blocks.height_log2;
  for (std::int64_t r = 0; r < tile_rows; ++r) {
    const std::int64_t first = blocks.first_of_row(r), of_block = r % height;
    if (of_block == 0 && height > 1) {
      for (float& sum : columns) sum = 0.0f;
      for (auto& line : lines)
        for (float& sum : line) sum = 0.0f;
    }
    for (int s = 0; s < 2; ++s) {
      spread_blocks<kSide>(choices[s].factor + first, factor);
      spread_blocks<kSide>(choices[s].scale + first, scale);
      square_errors<F>(tensor, tile.row(r), factor, scale, squares + s * kTileCols);
    }
    if (is_down) {
      for (std::int64_t c = 0; c < 2 * kTileCols; ++c) columns[c] = columns[c] + squares[c];
    } else {
      add_in_order(squares, lines[of_block]);
    }
    if (of_block + 1 < height && r + 1 < tile_rows) continue;
    if (is_down) transpose_16x16(columns, kSide, lines[0], kErrorLanes);
    for (std::int64_t lane = 0; lane < kErrorLanes; ++lane)
      errors[lane / kBlocksPerRow][first + lane % kBlocksPerRow] =
          height == 1 ? lines[0][lane] : add_lines(lines, lane);
  }
}

template <class F, class T>
MINIFLOAT_INLINE void choose_scales(const OperandPlan& plan, const TileRange& range,
                                    const TileView<T>& tile, TileBlocks& blocks) {
  const Spec& spec = plan.operand.spec;
  const TensorScale& tensor = plan.tensor[range.batch];
  const bool is_down = plan.columnwise && spec.transform == 0 && spec.block_rows > 1;
  const std::int64_t count = round_up<std::int64_t>(blocks.rows * blocks.cols, 16);
  ScaleChoice choices[2];
  alignas(64) float errors[2][TileBlocks::kMaxBlocks];
  for (int second = 0; second < 2; ++second) {
    if (second)
      for (std::int64_t b = 0; b < count; ++b) blocks.amax[b] |= kSecondScale;
    block_scales<F>(plan, range, blocks);
    for (std::int64_t b = 0; b < count; ++b) {
      choices[second].factor[b] = blocks.factor[b];
      choices[second].scale[b] = blocks.scale[b];
    }
  }
  block_errors<F>(tensor, tile, range.rows, blocks, choices, is_down, errors);
  for (std::int64_t b = 0; b < blocks.rows * blocks.cols; ++b)
    if (!takes_second(errors[0][b], errors[1][b])) blocks.amax[b] &= ~kSecondScale;
}

}  // namespace minifloat::cpu
