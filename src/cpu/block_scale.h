// The scales of a tile's blocks: their amax, the scale by each rule (core/scale_rule.h), and the
// factor of their elements.
#pragma once

#include <cstdint>

#include "lanes.h"
#include "minifloat/core/philox.h"
#include "minifloat/core/scale_rule.h"
#include "minifloat/core/swizzle.h"
#include "minifloat/quantize.h"
#include "tile.h"

namespace minifloat::cpu {

// The values of an operand that are fixed before its tiles: its sizes as read, the factors that no
// block decides, and the key of its random bits.
struct OperandPlan {
  Operand operand;
  std::int64_t batch, rows, cols, padded;  // as read
  std::int64_t code_pitch;                 // bytes a row
  std::int64_t scale_rows, scale_cols;     // block rules
  const TensorScale* tensor = nullptr;     // (batch): rules with an amax of the tensor, or
                                           // (batch, rows): blocks and an amax of the row
  const ScaleFactors* row = nullptr;       // (batch, rows): row scaling
  bool columnwise = false;
  RandomKey random;
  std::int64_t length = 0;  // columns of a row in memory; 0: the padded ones alone

  MINIFLOAT_INLINE std::int64_t pitch() const { return length > 0 ? length : padded; }
  MINIFLOAT_INLINE std::int64_t scale_pitch() const {
    if (operand.row_bytes > 0) return operand.row_bytes / operand.spec.scale_bytes();
    return length > 0 ? length / operand.spec.block_cols : scale_cols;
  }
};

// Returns the row of the random counter, of a row as read.
MINIFLOAT_INLINE std::uint32_t counter_row(const OperandPlan& plan, std::int64_t batch,
                                           std::int64_t row) {
  const Operand& operand = plan.operand;
  if (operand.random.row_ids) return static_cast<std::uint32_t>(operand.random.row_ids[row]);
  return static_cast<std::uint32_t>(operand.origin.row + batch * plan.rows + row);
}

// The blocks of a tile: a grid of `rows` x `cols`, in row-major order. Row and tensor scaling have
// one block a tile row. Loops run over all kMaxBlocks places of the largest grid, in whole vectors;
// places past the actual grid are unused.
struct TileBlocks {
  static constexpr std::int64_t kMaxBlocks = kTileRows * kTileCols / 16;
  int height_log2, width_log2;  // of a block; divisions cost more than the elements
  std::int64_t rows, cols;      // of the grid
  bool any_zero = false;        // is an NVFP4 scale 0?
  bool any_nan = false;         // is a factor NaN?
  alignas(64) std::uint32_t amax[kMaxBlocks];
  alignas(64) std::uint32_t code[kMaxBlocks];  // E8M0 or E4M3
  alignas(64) float scale[kMaxBlocks];         // the factor of codes in an exact product
  alignas(64) float factor[kMaxBlocks];        // the factor of elements before encoding

  MINIFLOAT_INLINE TileBlocks(const Spec& spec, std::int64_t tile_rows) {
    height_log2 = __builtin_ctz(static_cast<unsigned>(spec.has_blocks() ? spec.block_rows : 1));
    width_log2 = __builtin_ctz(
        static_cast<unsigned>(spec.has_blocks() ? spec.block_cols : static_cast<int>(kTileCols)));
    rows = block_row_of(tile_rows - 1) + 1;
    cols = kTileCols >> width_log2;
  }
  MINIFLOAT_INLINE std::int64_t block_row_of(std::int64_t row) const { return row >> height_log2; }
  MINIFLOAT_INLINE std::int64_t block_col_of(std::int64_t col) const { return col >> width_log2; }
  // Returns the first block of tile row r, in the grid's order.
  MINIFLOAT_INLINE std::int64_t first_of_row(std::int64_t r) const {
    return block_row_of(r) * cols;
  }
};

// ---- amax ---------------------------------------------------------------------------------------
// The amax of each 16 neighbours, over 32 vectors of a tile at a time. Four rounds keep the larger
// of two neighbours:
//
//     32 vectors -> 16 -> 8 -> 4 -> 2, whose lanes are the blocks of 16 in order
template <class T>
struct Run;
template <>
struct Run<float> {
  using Bits = std::uint32_t;
  using Vector = LaneBits;
  static constexpr std::int64_t kRows = 4;  // of a tile
  static constexpr std::uint32_t kMask = Float32::kMagnitude;
  static constexpr int kShift = 0;  // to the bits of a float
};
template <>
struct Run<std::uint16_t> {
  using Bits = std::uint16_t;
  using Vector = LaneHalves;
  static constexpr std::int64_t kRows = 8;
  static constexpr std::uint16_t kMask = Float32::kMagnitude >> 16;
  static constexpr int kShift = 16;
};

template <int Count, class Vector>
MINIFLOAT_INLINE void halve_all(Vector* v) {  // in place: Count vectors to Count / 2
  for (int i = 0; i < Count / 2; ++i) halve(v[i], v[2 * i], v[2 * i + 1]);
}

// Computes the amaxes of rows [first, first + kRows) of the tile. Past its end the last row is read
// again, and its results are unused.
template <class T>
MINIFLOAT_INLINE void amax_of_16s(const TileView<T>& tile, std::int64_t first, std::int64_t rows,
                                  std::uint32_t* amax) {  // (kRows, kTileCols / 16)
  using Vector = typename Run<T>::Vector;
  constexpr int kLanes = sizeof(Vector) / sizeof(T), kPerRow = static_cast<int>(kTileCols) / kLanes;
  Vector v[16];
  for (int i = 0; i < 16; ++i) {
    const std::int64_t r = first + 2 * i / kPerRow;
    const T* from = tile.row(r < rows ? r : rows - 1) + 2 * i % kPerRow * kLanes;
    Vector a, b;
    __builtin_memcpy(&a, from, sizeof a);
    __builtin_memcpy(&b, from + kLanes, sizeof b);
    halve(v[i], a & Run<T>::kMask, b & Run<T>::kMask);
  }
  halve_all<16>(v);
  halve_all<8>(v);
  halve_all<4>(v);
  typename Run<T>::Bits bits[2 * kLanes];
  __builtin_memcpy(bits, v, sizeof bits);
  for (int i = 0; i < 2 * kLanes; ++i)
    amax[i] = static_cast<std::uint32_t>(bits[i]) << Run<T>::kShift;
}

// Joins the 16s of blocks one row high, over all rows of a run.
template <class T, int Width>
MINIFLOAT_INLINE void join_16s(const std::uint32_t* __restrict of_16s,
                               std::uint32_t* __restrict amax) {
  for (std::int64_t b = 0; b < Run<T>::kRows * kTileCols / Width; ++b) {
    std::uint32_t m = of_16s[b * (Width / 16)];
    for (int i = 1; i < Width / 16; ++i) {
      const std::uint32_t x = of_16s[b * (Width / 16) + i];
      m = x > m ? x : m;
    }
    amax[b] = m;
  }
}

// Raises the amaxes of blocks of many rows by one more row.
template <int Width>
MINIFLOAT_INLINE void raise_amax(const std::uint32_t* __restrict of_16s,
                                 std::uint32_t* __restrict amax) {
  for (std::int64_t b = 0; b < kTileCols / Width; ++b)
    for (int i = 0; i < Width / 16; ++i) {
      const std::uint32_t x = of_16s[b * (Width / 16) + i];
      amax[b] = x > amax[b] ? x : amax[b];
    }
}

template <class T, int Width>
MINIFLOAT_INLINE void block_amax_of(const TileView<T>& tile, std::int64_t tile_rows,
                                    TileBlocks& blocks) {
  constexpr std::int64_t kOf16s = kTileCols / 16;  // a row
  alignas(64) std::uint32_t of_16s[Run<T>::kRows * kOf16s];
  if (blocks.height_log2 > 0)
    for (std::int64_t b = 0; b < blocks.rows * blocks.cols; ++b) blocks.amax[b] = 0;
  for (std::int64_t first = 0; first < tile_rows; first += Run<T>::kRows) {
    amax_of_16s(tile, first, tile_rows, of_16s);
    if (blocks.height_log2 == 0) {
      join_16s<T, Width>(of_16s, blocks.amax + blocks.first_of_row(first));
      continue;
    }
    const std::int64_t left = tile_rows - first, rows = left < Run<T>::kRows ? left : Run<T>::kRows;
    for (std::int64_t r = 0; r < rows; ++r)
      raise_amax<Width>(of_16s + r * kOf16s, blocks.amax + blocks.first_of_row(first + r));
  }
}

template <class T>
MINIFLOAT_INLINE void block_amax(const TileView<T>& tile, std::int64_t tile_rows,
                                 TileBlocks& blocks) {
  if (blocks.cols == kTileCols / 16) return block_amax_of<T, 16>(tile, tile_rows, blocks);
  if (blocks.cols == kTileCols / 32) return block_amax_of<T, 32>(tile, tile_rows, blocks);
  block_amax_of<T, kTileCols>(tile, tile_rows, blocks);
}

// ---- Scales -------------------------------------------------------------------------------------
template <class F>
struct ScaleBlocks {
  const TensorScale& tensor;
  std::int64_t first, end;
  TileBlocks& blocks;

  template <ScaleRule kRule, ScaleRounding kRounding>
  MINIFLOAT_INLINE void run() const {
    for (std::int64_t b = first; b < end; ++b) {
      const BlockScale scale = scale_of_block<F>(kRule, kRounding, tensor, blocks.amax[b]);
      blocks.code[b] = scale.code;
      blocks.scale[b] = scale.scale;
      blocks.factor[b] = scale.encode;
    }
  }
};

template <class F>
MINIFLOAT_INLINE void block_scales(const OperandPlan& plan, const TileRange& range,
                                   TileBlocks& blocks) {
  const Spec& spec = plan.operand.spec;
  const auto scale = [&](const TensorScale& outer, std::int64_t first, std::int64_t end) {
    with_block_rule<F>(spec.rule, spec.scale_rounding, ScaleBlocks<F>{outer, first, end, blocks});
  };
  if (spec.has_row_amax()) {  // blocks of one row
    for (std::int64_t r = 0; r < range.rows; ++r)
      scale(plan.tensor[range.batch * plan.rows + range.row_of(r)], r * blocks.cols,
            (r + 1) * blocks.cols);
    return;
  }
  const std::int64_t count = round_up<std::int64_t>(blocks.rows * blocks.cols, 16);
  scale(plan.tensor ? plan.tensor[range.batch] : TensorScale{}, 0, count);
}

// Copies the factors of tensor and row scaling, which are fixed before the tiles.
MINIFLOAT_INLINE void fixed_scales(const OperandPlan& plan, const TileRange& range,
                                   TileBlocks& blocks) {
  const Spec& spec = plan.operand.spec;
  const bool is_after_product = is_scaled_after_product(spec.rule, spec.scale_rounding);
  for (std::int64_t r = 0; r < range.rows; ++r) {
    const ScaleFactors factors =
        spec.rule == ScaleRule::kTensor
            ? ScaleFactors{plan.tensor[range.batch].encode, plan.tensor[range.batch].scale}
            : plan.row[range.batch * plan.rows + range.row_of(r)];
    blocks.factor[r] = factors.encode;
    blocks.scale[r] = is_after_product ? 1.0f : factors.scale;
  }
}

// Stores the grid as the operand's scales. In a strip, consecutive blocks are stored consecutively.
template <class From, class To>
MINIFLOAT_INLINE void store_grid(const OperandPlan& plan, const TileRange& range,
                                 const TileBlocks& blocks, const From* from, To* scale) {
  const std::int64_t col = blocks.block_col_of(range.col), left = plan.scale_cols - col;
  const std::int64_t rows = range.is_strip ? 1 : blocks.rows;
  const std::int64_t cols = range.is_strip ? blocks.rows * blocks.cols : blocks.cols;
  const std::int64_t inside = cols < left ? cols : left;
  const std::int64_t pitch = plan.scale_pitch();
  To* out = scale + (range.batch * plan.scale_rows + blocks.block_row_of(range.row)) * pitch + col;
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < inside; ++c)
      out[r * pitch + c] = static_cast<To>(from[r * blocks.cols + c]);
}

// Stores one-byte scales in the swizzled layout: for each row that of its block.
MINIFLOAT_INLINE void store_swizzled(const OperandPlan& plan, const TileRange& range,
                                     const TileBlocks& blocks) {
  const std::int64_t col = blocks.block_col_of(range.col), left = plan.scale_cols - col;
  const std::int64_t rows = range.is_strip ? 1 : range.rows;
  const std::int64_t cols = range.is_strip ? blocks.rows * blocks.cols : blocks.cols;
  const std::int64_t inside = cols < left ? cols : left;
  std::uint8_t* out = static_cast<std::uint8_t*>(plan.operand.scale) +
                      range.batch * swizzled_size(plan.rows, plan.scale_cols);
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::uint32_t* from = blocks.code + blocks.first_of_row(r);
    for (std::int64_t c = 0; c < inside; ++c)
      out[swizzled_offset(range.row + r, col + c, plan.scale_cols)] =
          static_cast<std::uint8_t>(from[c]);
  }
}

MINIFLOAT_INLINE void store_scales(const OperandPlan& plan, const TileRange& range,
                                   const TileBlocks& blocks) {
  if (plan.operand.swizzled)
    store_swizzled(plan, range, blocks);
  else if (plan.operand.spec.rule == ScaleRule::kBlock)
    store_grid(plan, range, blocks, blocks.scale, static_cast<float*>(plan.operand.scale));
  else
    store_grid(plan, range, blocks, blocks.code, static_cast<std::uint8_t*>(plan.operand.scale));
}

// Spreads one number a block of Width to one an element of a tile row, so that the loops over
// elements are flat.
template <int Width>
MINIFLOAT_INLINE void spread_blocks(const float* __restrict of_block,
                                    float* __restrict of_element) {
  for (std::int64_t b = 0; b < kTileCols / Width; ++b)
    for (int i = 0; i < Width; ++i) of_element[b * Width + i] = of_block[b];
}

// Notes which exceptions the elements of the tile can meet: zero scales and NaN factors.
MINIFLOAT_INLINE void note_exceptions(const Spec& spec, TileBlocks& blocks) {
  std::uint32_t least = 1, largest = 0;
  for (std::int64_t b = 0; b < blocks.rows * blocks.cols; ++b) {
    const std::uint32_t factor = magnitude_bits(blocks.factor[b]);
    largest = factor > largest ? factor : largest;
  }
  if (block_rule(spec.rule) == BlockRule::kE4m3)
    for (std::int64_t b = 0; b < blocks.rows * blocks.cols; ++b)
      least = blocks.code[b] < least ? blocks.code[b] : least;
  blocks.any_zero = has_zero_codes(spec.rule, least);
  blocks.any_nan = largest > Float32::kExponent;
}

}  // namespace minifloat::cpu
