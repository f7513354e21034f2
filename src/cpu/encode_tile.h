// A tile of fp32 values -> codes, block scales and, where asked for, the values of the codes.
//
//     1  amax of each block                                          (core/scaling.h says what each rule
//     2  scale of each block, and the factor its elements are        does with it)
//        multiplied by
//     3  every element: multiply, encode
//     4  store what lies inside the operand
#pragma once

#include <cstdint>

#include "encode_fast.h"
#include "minifloat/core/philox.h"
#include "minifloat/core/scaling.h"
#include "minifloat/quantize.h"
#include "tile.h"

namespace minifloat::cpu {

// What of an operand is settled before its tiles: its sizes as read, the factors that no block decides, and
// the key of its random bits.
struct OperandPlan {
  Operand operand;
  std::int64_t batch, rows, cols, padded;  // as read
  std::int64_t code_pitch;                 // bytes a row
  std::int64_t scale_rows, scale_cols;     // block rules
  const Factors* tensor = nullptr;         // (batch): tensor scaling
  const Factors* row = nullptr;            // (batch, rows): row scaling
  const Nvfp4Tensor* nvfp4 = nullptr;      // (batch)
  std::uint64_t key = 0, stream = 0;
};

struct EncodeArgs {
  const OperandPlan* plan;
  const TileRange* range;
  Tile* tile;
};

// The blocks of a tile: a grid of `rows` x `cols`, in row-major order. Row and tensor scaling have one block a tile
// row. Loops run over all kMaxBlocks places that the grid may take, in whole vectors; what lies past it is unused.
struct TileBlocks {
  static constexpr std::int64_t kMaxBlocks = kTileRows * kTileCols / 16;
  int height, width;        // of a block
  std::int64_t rows, cols;  // of the grid
  bool any_zero = false;    // is an NVFP4 scale 0?
  alignas(64) std::uint32_t amax[kMaxBlocks];
  alignas(64) std::uint32_t code[kMaxBlocks];  // E8M0 or E4M3
  alignas(64) float scale[kMaxBlocks];         // what an exact product multiplies codes by
  alignas(64) float factor[kMaxBlocks];        // what elements are multiplied by
};

MINIFLOAT_INLINE void larger(LaneBits& out, const LaneBits& a, const LaneBits& b) {
  out = a > b ? a : b;
}

// amax of each 16 elements of a tile row, as a tournament: each round keeps the larger half of every group of
// lanes and brings two vectors together, 8 vectors of one group to one vector of 8.
//
//     16 lanes:  aaaa aaaa aaaa aaaa  +  bbbb…   ->  aaaa aaaa bbbb bbbb  ->  aaaa bbbb cccc dddd  ->  aabb ccdd …
MINIFLOAT_INLINE void amax_of_16s(const float* row, std::uint32_t* amax) {
  const LaneBits* in = reinterpret_cast<const LaneBits*>(row);  // (8)
  LaneBits v[8];
  for (int i = 0; i < 8; ++i) v[i] = in[i] & Float32::kMagnitude;
  for (int i = 0; i < 4; ++i) {
    const LaneBits a = v[2 * i], b = v[2 * i + 1];
    larger(v[i],
           __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
           __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30,
                                   31));
  }
  for (int i = 0; i < 2; ++i) {
    const LaneBits a = v[2 * i], b = v[2 * i + 1];
    larger(
        v[i],
        __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
        __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
  }
  LaneBits pairs;
  larger(
      pairs,
      __builtin_shufflevector(v[0], v[1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29),
      __builtin_shufflevector(v[0], v[1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30,
                              31));
  for (int i = 0; i < 8; ++i)
    amax[i] = pairs[2 * i] > pairs[2 * i + 1] ? pairs[2 * i] : pairs[2 * i + 1];
}

template <int Width>
MINIFLOAT_INLINE void raise_amax(const float* row, std::uint32_t* amax) {
  std::uint32_t of_16s[kTileCols / 16];
  amax_of_16s(row, of_16s);
  for (std::int64_t b = 0; b < kTileCols / Width; ++b) {
    std::uint32_t m = amax[b];
    for (int i = 0; i < Width / 16; ++i) {
      const std::uint32_t x = of_16s[b * (Width / 16) + i];
      m = x > m ? x : m;
    }
    amax[b] = m;
  }
}

MINIFLOAT_INLINE void block_amax(Tile& tile, std::int64_t tile_rows, TileBlocks& blocks) {
  for (std::int64_t b = 0; b < blocks.rows * blocks.cols; ++b) blocks.amax[b] = 0;
  for (std::int64_t r = 0; r < tile_rows; ++r) {
    std::uint32_t* amax = blocks.amax + r / blocks.height * blocks.cols;
    if (blocks.width == 16) raise_amax<16>(tile.row(r), amax);
    if (blocks.width == 32) raise_amax<32>(tile.row(r), amax);
    if (blocks.width == 128) raise_amax<128>(tile.row(r), amax);
  }
}

inline Nvfp4Rounding nvfp4_rounding(const Spec& spec) {
  if (spec.scale_rounding == ScaleRounding::kUp) return Nvfp4Rounding::kUp;
  if (spec.scale_rounding == ScaleRounding::kPowerOfTwo) return Nvfp4Rounding::kPowerOfTwo;
  return Nvfp4Rounding::kNearest;
}

template <class F>
MINIFLOAT_INLINE void mx_scales(bool floor, std::int64_t count, TileBlocks& blocks) {
  for (std::int64_t b = 0; b < count; ++b) {
    const std::uint32_t code =
        floor ? mx_scale_floor<F>(blocks.amax[b]) : mx_scale_up<F>(blocks.amax[b]);
    blocks.code[b] = code;
    blocks.scale[b] = decode_e8m0(code);
    blocks.factor[b] = e8m0_reciprocal(code);
  }
}

MINIFLOAT_INLINE void nvfp4_scales(const Nvfp4Tensor& tensor, Nvfp4Rounding rounding,
                                   std::int64_t count, TileBlocks& blocks) {
  for (std::int64_t b = 0; b < count; ++b) {
    const std::uint32_t code = nvfp4_block_scale(blocks.amax[b], tensor.block_encode, rounding);
    blocks.code[b] = code;
    blocks.scale[b] = decode<E4M3>(code);
    blocks.factor[b] = nvfp4_encode_factor(code, tensor.scale);
  }
}

template <class F>
MINIFLOAT_INLINE void block_scales(const OperandPlan& plan, std::int64_t batch,
                                   TileBlocks& blocks) {
  const Spec& spec = plan.operand.spec;
  const std::int64_t count = round_up<std::int64_t>(blocks.rows * blocks.cols, 16);
  if (spec.rule == ScaleRule::kMx)
    return mx_scales<F>(spec.scale_rounding == ScaleRounding::kFloor, count, blocks);
  if (spec.rule == ScaleRule::kNvfp4) {
    const Nvfp4Rounding rounding = nvfp4_rounding(spec);
    if (rounding == Nvfp4Rounding::kNearest)  // three loops, each without a choice inside
      nvfp4_scales(plan.nvfp4[batch], Nvfp4Rounding::kNearest, count, blocks);
    else if (rounding == Nvfp4Rounding::kUp)
      nvfp4_scales(plan.nvfp4[batch], Nvfp4Rounding::kUp, count, blocks);
    else
      nvfp4_scales(plan.nvfp4[batch], Nvfp4Rounding::kPowerOfTwo, count, blocks);
    std::uint32_t least = blocks.code[0];
    for (std::int64_t b = 0; b < count; ++b)
      least = blocks.code[b] < least ? blocks.code[b] : least;
    blocks.any_zero = least == 0;
    return;
  }
  for (std::int64_t b = 0; b < count; ++b) {
    const Factors factors = fp8_factors<F>(blocks.amax[b], true);
    blocks.scale[b] = factors.scale;
    blocks.factor[b] = factors.encode;
  }
}

// Tensor and row scaling: what was settled before the tiles.
MINIFLOAT_INLINE void settled_scales(const OperandPlan& plan, const TileRange& range,
                                     TileBlocks& blocks) {
  const Spec& spec = plan.operand.spec;
  const bool whole = spec.rule == ScaleRule::kTensor;
  const bool owed = whole || spec.scale_rounding == ScaleRounding::kExact;  // by the exact product
  for (std::int64_t r = 0; r < range.rows; ++r) {
    const Factors factors =
        whole ? plan.tensor[range.batch] : plan.row[range.batch * plan.rows + range.row + r];
    blocks.factor[r] = factors.encode;
    blocks.scale[r] = owed ? 1.0f : factors.scale;
  }
}

// Row r of the grid goes to `at`; nearly always the whole row is inside.
template <class T>
MINIFLOAT_INLINE void store_scale_row(const T* from, T* to, std::int64_t inside) {
  if (inside == 8)
    __builtin_memcpy(to, from, 8 * sizeof(T));  // the widest grid, of blocks of 16
  else
    for (std::int64_t c = 0; c < inside; ++c) to[c] = from[c];
}

MINIFLOAT_INLINE void store_scales(const OperandPlan& plan, const TileRange& range,
                                   const TileBlocks& blocks) {
  const std::int64_t first_row = range.row / blocks.height, first_col = range.col / blocks.width;
  const std::int64_t left = plan.scale_cols - first_col;
  const std::int64_t cols = left < blocks.cols ? left : blocks.cols;
  std::uint8_t bytes[TileBlocks::kMaxBlocks];
  for (std::int64_t b = 0; b < round_up<std::int64_t>(blocks.rows * blocks.cols, 16); ++b)
    bytes[b] = static_cast<std::uint8_t>(blocks.code[b]);
  for (std::int64_t r = 0; r < blocks.rows; ++r) {
    const std::int64_t at =
        (range.batch * plan.scale_rows + first_row + r) * plan.scale_cols + first_col;
    if (plan.operand.spec.rule == ScaleRule::kBlock)
      store_scale_row(blocks.scale + r * blocks.cols, static_cast<float*>(plan.operand.scale) + at,
                      cols);
    else
      store_scale_row(bytes + r * blocks.cols, static_cast<std::uint8_t*>(plan.operand.scale) + at,
                      cols);
  }
}

// Each element's 16 random bits, a row of the tile: (kTileCols)
template <int FormatBits>
MINIFLOAT_INLINE void row_random_bits(const OperandPlan& plan, std::uint32_t row,
                                      std::uint32_t group, std::uint32_t* bits) {
  constexpr int kGroups = kTileCols / kElementsPerCall;
  std::uint64_t by_word[4][kGroups];  // the calls of a row run side by side, a 64-bit lane each
  for (int g = 0; g < kGroups; ++g) {
    const auto w = random_words<std::uint64_t>(plan.key, plan.stream, row,
                                               group + static_cast<std::uint32_t>(g));
    for (int i = 0; i < 4; ++i) by_word[i][g] = w.w[i];
  }
  std::uint32_t words[kGroups * 4];
  for (int g = 0; g < kGroups; ++g)
    for (int i = 0; i < 4; ++i) words[4 * g + i] = static_cast<std::uint32_t>(by_word[i][g]);
  for (int j = 0; j < kGroups * 4; ++j)
    for (int lane = 0; lane < kElementsPerWord; ++lane)
      bits[kElementsPerWord * j + lane] = random_bits<FormatBits>(words[j], lane);
}

// What an exact product reads of a value (docs/numerics.md): bf16, zero below 2^-126, saturated above.
MINIFLOAT_INLINE std::uint16_t product_value(float v) {
  constexpr std::uint32_t kMax = bit_cast<std::uint32_t>(BF16::kMax);
  const std::uint32_t magnitude = magnitude_bits(v);
  const std::uint32_t sign = bit_cast<std::uint32_t>(v) & 0x8000'0000u;
  const std::uint32_t clamped = magnitude < kMax ? magnitude : kMax;
  const std::uint32_t normal = magnitude < Float32::kImplicitBit ? 0u : clamped;
  const std::uint32_t bits = magnitude > Float32::kExponent ? Float32::kNanBits : sign | normal;
  return static_cast<std::uint16_t>(bits >> 16);
}

// One number a block of Width -> one an element of a tile row, so that the loops over elements are flat.
template <int Width>
MINIFLOAT_INLINE void spread_blocks(const float* __restrict of_block,
                                    float* __restrict of_element) {
  for (std::int64_t b = 0; b < kTileCols / Width; ++b)
    for (int i = 0; i < Width; ++i) of_element[b * Width + i] = of_block[b];
}

// Elements of one tile row, all kTileCols of them. factor: one a block of Width.
template <class F, bool kStochastic, int Width>
MINIFLOAT_INLINE void encode_row(const float* __restrict row, const float* factor,
                                 const std::uint32_t* __restrict bits,
                                 std::uint8_t* __restrict codes) {
  float spread[kTileCols];
  spread_blocks<Width>(factor, spread);
  for (std::int64_t c = 0; c < kTileCols; ++c) {
    if constexpr (kStochastic)
      codes[c] = static_cast<std::uint8_t>(encode_stochastic<F>(row[c] * spread[c], bits[c]));
    else
      codes[c] = static_cast<std::uint8_t>(encode_nearest<F>(row[c] * spread[c]));
  }
}

// What the multiplication alone would get wrong: under +delayed an infinite element becomes NaN, and NVFP4
// blocks of scale 0 become zeros.
MINIFLOAT_INLINE void prepare_row(const Spec& spec, bool any_zero, const std::uint32_t* block_codes,
                                  float* row) {
  if (spec.delayed)
    for (std::int64_t c = 0; c < kTileCols; ++c)
      row[c] = is_finite(magnitude_bits(row[c])) ? row[c] : nan_value();
  if (!any_zero) return;
  for (std::int64_t b = 0; b < kTileCols / 16; ++b)
    if (block_codes[b] == 0)
      for (int i = 0; i < 16; ++i) row[16 * b + i] = 0.0f;
}

// `inside` of Whole elements; nearly always all of them, which is a copy of a known size.
template <std::int64_t Whole, class T>
MINIFLOAT_INLINE void store_inside(const T* from, T* to, std::int64_t inside) {
  if (inside == Whole)
    __builtin_memcpy(to, from, Whole * sizeof(T));
  else
    __builtin_memcpy(to, from, static_cast<std::size_t>(inside) * sizeof(T));
}

template <class F>
MINIFLOAT_INLINE void store_row(const OperandPlan& plan, const TileRange& range, std::int64_t r,
                                const std::uint8_t* codes) {
  const std::int64_t inside =
      plan.padded - range.col < kTileCols ? plan.padded - range.col : kTileCols;
  std::uint8_t* out =
      plan.operand.codes + (range.batch * plan.rows + range.row + r) * plan.code_pitch;
  if constexpr (F::kBits == 4) {
    std::uint8_t packed[kTileCols / 2];
    for (std::int64_t i = 0; i < kTileCols / 2; ++i)
      packed[i] = pack_nibbles(codes[2 * i], codes[2 * i + 1]);
    if (inside % 2) packed[inside / 2] &= 0x0F;
    store_inside<kTileCols / 2>(packed, out + range.col / 2, (inside + 1) / 2);
  } else {
    store_inside<kTileCols>(codes, out + range.col, inside);
  }
}

template <class F>
MINIFLOAT_INLINE void decode_row(const std::uint8_t* __restrict codes,
                                 const float* __restrict scale, std::uint16_t* __restrict values) {
  for (std::int64_t c = 0; c < kTileCols; ++c)
    values[c] = product_value(decode<F>(codes[c]) * scale[c]);
}

template <class F, int Width>
MINIFLOAT_INLINE void store_decoded(const OperandPlan& plan, const TileRange& range, std::int64_t r,
                                    const float* scale, const std::uint8_t* codes) {
  const std::int64_t inside =
      plan.padded - range.col < kTileCols ? plan.padded - range.col : kTileCols;
  float spread[kTileCols];
  std::uint16_t values[kTileCols];
  spread_blocks<Width>(scale, spread);
  decode_row<F>(codes, spread, values);
  const std::int64_t row = range.batch * plan.rows + range.row + r;
  store_inside<kTileCols>(values, plan.operand.decoded + row * plan.padded + range.col, inside);
}

template <class F, bool kStochastic>
struct EncodeTile {
  MINIFLOAT_INLINE static void run(const EncodeArgs& args) {
    const OperandPlan& plan = *args.plan;
    const Spec& spec = plan.operand.spec;
    TileBlocks blocks;
    blocks.height = spec.has_blocks() ? spec.block_rows : 1;
    blocks.width = spec.has_blocks() ? spec.block_cols : static_cast<int>(kTileCols);
    blocks.rows = ceil_div<std::int64_t>(args.range->rows, blocks.height);
    blocks.cols = kTileCols / blocks.width;
    if (spec.has_blocks()) {
      block_amax(*args.tile, args.range->rows, blocks);
      block_scales<F>(plan, args.range->batch, blocks);
      store_scales(plan, *args.range, blocks);
    } else {
      settled_scales(plan, *args.range, blocks);
    }
    // E2M1 has blocks of 16 or 32, FP8 of 32 or a whole tile row.
    constexpr int kNarrow = F::kBits == 4 ? 16 : 32, kWide = F::kBits == 4 ? 32 : kTileCols;
    if (blocks.width == kNarrow)
      encode_rows<kNarrow>(args, blocks);
    else
      encode_rows<kWide>(args, blocks);
  }

  template <int Width>
  MINIFLOAT_INLINE static void encode_rows(const EncodeArgs& args, const TileBlocks& blocks) {
    const OperandPlan& plan = *args.plan;
    const TileRange& range = *args.range;
    const Operand& operand = plan.operand;
    alignas(64) std::uint8_t codes[kTileCols];
    alignas(64) std::uint32_t bits[kTileCols];
    for (std::int64_t r = 0; r < range.rows; ++r) {
      const std::int64_t first = r / blocks.height * blocks.cols;  // the row's first block
      if constexpr (kStochastic)
        row_random_bits<F::kBits>(
            plan,
            static_cast<std::uint32_t>(operand.origin.row + range.batch * plan.rows + range.row +
                                       r),
            static_cast<std::uint32_t>((operand.origin.col + range.col) / kElementsPerCall), bits);
      float* row = args.tile->row(r);
      prepare_row(operand.spec, blocks.any_zero, blocks.code + first, row);
      encode_row<F, kStochastic, Width>(row, blocks.factor + first, bits, codes);
      store_row<F>(plan, range, r, codes);
      if (operand.decoded) store_decoded<F, Width>(plan, range, r, blocks.scale + first, codes);
    }
  }
};

}  // namespace minifloat::cpu
