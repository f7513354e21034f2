// The correction of a tile's block scales under +eden (core/eden.h). A tile row is the 128 columns
// of one correction.
//
// The 8 blocks of two tile rows are 16 lanes, whose sums advance together, each in its own order:
//
//     elements of two tile rows (16 lanes, 16 elements)  --transpose-->  (16 elements, 16 lanes)
//     codes' values of them                              --transpose-->  the same
//     sums = 0 + element 0 + element 1 + ... + element 15                (16 lanes)
#pragma once

#include <cstdint>

#include "block_scale.h"
#include "encode_fast.h"
#include "lanes.h"
#include "minifloat/core/eden.h"
#include "tile.h"

namespace minifloat::cpu {

static_assert(kTileCols == kEdenPoints);
inline constexpr std::int64_t kEdenSide = 16;  // of a block
inline constexpr std::int64_t kEdenRows = 2;   // of a tile, at a time
inline constexpr std::int64_t kEdenLanes = kEdenRows * kEdenBlocks;
static_assert(kEdenLanes == kEdenSide, "lanes and elements are transposed as 16 x 16");

// Computes the elements of one tile row and their codes' values, in kEdenUnit.
//   factor: one an element; scaled, values: (kTileCols)
template <class F, class T>
MINIFLOAT_INLINE void round_row(const T* __restrict row, const float* __restrict factor,
                                float* __restrict scaled, float* __restrict values) {
  for (std::int64_t c = 0; c < kTileCols; ++c) {
    const float x = bit_cast<float>(magnitude_bits(to_float(row[c])));
    scaled[c] = x * (factor[c] * kEdenUnit);
    values[c] = round_magnitude<F>(x * factor[c]) * kEdenUnit;
  }
}

// Adds the elements of each block in order.
//   scaled, values: (kEdenLanes, kEdenSide); squares, products: (kEdenLanes)
MINIFLOAT_INLINE void add_elements(const float* __restrict scaled, const float* __restrict values,
                                   float* __restrict squares, float* __restrict products) {
  alignas(64) float by_element[2][kEdenSide * kEdenLanes];
  transpose_16x16(scaled, kEdenSide, by_element[0], kEdenLanes);
  transpose_16x16(values, kEdenSide, by_element[1], kEdenLanes);
  for (std::int64_t lane = 0; lane < kEdenLanes; ++lane) squares[lane] = products[lane] = 0.0f;
  for (std::int64_t i = 0; i < kEdenSide; ++i)
    for (std::int64_t lane = 0; lane < kEdenLanes; ++lane) {
      EdenSums sums = {squares[lane], products[lane]};
      add_element(sums, by_element[0][i * kEdenLanes + lane], by_element[1][i * kEdenLanes + lane]);
      squares[lane] = sums.squares;
      products[lane] = sums.products;
    }
}

// Replaces the scales of one tile row's blocks by the stored ones.   squares, products: of blocks
MINIFLOAT_INLINE void correct_row(const float* squares, const float* products,
                                  const RandomBits& bits, std::uint32_t* code, float* scale) {
  EdenSums sums[kEdenBlocks];
  for (int b = 0; b < kEdenBlocks; ++b) sums[b] = weighted({squares[b], products[b]}, scale[b]);
  for (int half = kEdenBlocks / 2; half > 0; half /= 2)
    for (int b = 0; b < half; ++b) sums[b] = add(sums[b], sums[b + half]);
  const float correction = eden_correction(sums[0]);
  for (int b = 0; b < kEdenBlocks; ++b) {
    code[b] = eden_scale(scale[b], correction, eden_bits(bits, b));
    scale[b] = decode<E4M3>(code[b]);
  }
}

// Replaces the scales of a tile's blocks by the stored ones. The factors of elements stay.
template <class F, class T>
MINIFLOAT_INLINE void correct_scales(const OperandPlan& plan, const TileRange& range,
                                     const TileView<T>& tile, TileBlocks& blocks) {
  alignas(64) float factor[kTileCols];
  alignas(64) float scaled[kEdenRows * kTileCols], values[kEdenRows * kTileCols];
  alignas(64) float squares[kEdenLanes], products[kEdenLanes];
  for (std::int64_t first = 0; first < range.rows; first += kEdenRows) {
    const std::int64_t left = range.rows - first, rows = left < kEdenRows ? left : kEdenRows;
    for (std::int64_t i = 0; i < kEdenRows; ++i) {  // past the end the last row is read again
      const std::int64_t r = first + (i < rows ? i : rows - 1);
      spread_blocks<kEdenSide>(blocks.factor + blocks.first_of_row(r), factor);
      round_row<F>(tile.row(r), factor, scaled + i * kTileCols, values + i * kTileCols);
    }
    add_elements(scaled, values, squares, products);
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t r = first + i, of_blocks = blocks.first_of_row(r);
      const RandomBits bits = eden_bits_at(
          plan.random, counter_row(plan, range.batch, range.row_of(r)),
          static_cast<std::uint32_t>((plan.operand.origin.col + range.col_of(r)) / kEdenPoints));
      correct_row(squares + i * kEdenBlocks, products + i * kEdenBlocks, bits,
                  blocks.code + of_blocks, blocks.scale + of_blocks);
    }
  }
}

}  // namespace minifloat::cpu
