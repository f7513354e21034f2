// A tile of fp32 values -> codes, block scales and, where asked for, the values of the codes.
//
//     1  amax of each block                                          (core/scaling.h says what each rule
//     2  scale of each block, and the factor its elements are        does with it)
//        multiplied by
//     3  every element: multiply, encode
//     4  store what lies inside the operand
#pragma once

#include <cstdint>

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

inline constexpr int kMaxBlocks = kTileCols / 16;  // along a tile row

// The scales of one block row of a tile.
struct BlockRow {
  std::uint32_t amax[kMaxBlocks];
  std::uint32_t code[kMaxBlocks];  // E8M0 or E4M3
  float scale[kMaxBlocks];         // what an exact product multiplies codes by
  float factor[kMaxBlocks];        // what elements are multiplied by
};

template <int Width>
MINIFLOAT_INLINE void raise_amax(const float* row, std::uint32_t* amax) {
  for (std::int64_t b = 0; b < kTileCols / Width; ++b) {
    std::uint32_t m = amax[b];
    for (int i = 0; i < Width; ++i) {
      const std::uint32_t x = magnitude_bits(row[b * Width + i]);
      m = x > m ? x : m;
    }
    amax[b] = m;
  }
}

MINIFLOAT_INLINE void block_row_amax(Tile& tile, std::int64_t first, std::int64_t last, int width,
                                     BlockRow& blocks) {
  for (int b = 0; b < kMaxBlocks; ++b) blocks.amax[b] = 0;
  for (std::int64_t r = first; r < last; ++r) {
    if (width == 16) raise_amax<16>(tile.row(r), blocks.amax);
    if (width == 32) raise_amax<32>(tile.row(r), blocks.amax);
    if (width == 128) raise_amax<128>(tile.row(r), blocks.amax);
  }
}

inline Nvfp4Rounding nvfp4_rounding(const Spec& spec) {
  if (spec.scale_rounding == ScaleRounding::kUp) return Nvfp4Rounding::kUp;
  if (spec.scale_rounding == ScaleRounding::kPowerOfTwo) return Nvfp4Rounding::kPowerOfTwo;
  return Nvfp4Rounding::kNearest;
}

template <class F>
MINIFLOAT_INLINE void mx_scales(bool floor, BlockRow& blocks) {
  for (int b = 0; b < kMaxBlocks; ++b) {
    blocks.code[b] = floor ? mx_scale_floor<F>(blocks.amax[b]) : mx_scale_up<F>(blocks.amax[b]);
    blocks.scale[b] = decode_e8m0(blocks.code[b]);
    blocks.factor[b] = e8m0_reciprocal(blocks.code[b]);
  }
}

MINIFLOAT_INLINE void nvfp4_scales(const Nvfp4Tensor& tensor, Nvfp4Rounding rounding,
                                   BlockRow& blocks) {
  for (int b = 0; b < kMaxBlocks; ++b) {
    blocks.code[b] = nvfp4_block_scale(blocks.amax[b], tensor.block_encode, rounding);
    blocks.scale[b] = decode<E4M3>(blocks.code[b]);
    blocks.factor[b] = nvfp4_encode_factor(blocks.code[b], tensor.scale);
  }
}

template <class F>
MINIFLOAT_INLINE void block_scales(const OperandPlan& plan, std::int64_t batch, BlockRow& blocks) {
  const Spec& spec = plan.operand.spec;
  if (spec.rule == ScaleRule::kMx)
    return mx_scales<F>(spec.scale_rounding == ScaleRounding::kFloor, blocks);
  if (spec.rule == ScaleRule::kNvfp4) {
    const Nvfp4Rounding rounding = nvfp4_rounding(spec);
    if (rounding == Nvfp4Rounding::kNearest)  // three loops, each without a choice inside
      return nvfp4_scales(plan.nvfp4[batch], Nvfp4Rounding::kNearest, blocks);
    if (rounding == Nvfp4Rounding::kUp)
      return nvfp4_scales(plan.nvfp4[batch], Nvfp4Rounding::kUp, blocks);
    return nvfp4_scales(plan.nvfp4[batch], Nvfp4Rounding::kPowerOfTwo, blocks);
  }
  for (int b = 0; b < kMaxBlocks; ++b) {
    const Factors factors = fp8_factors<F>(blocks.amax[b], true);
    blocks.scale[b] = factors.scale;
    blocks.factor[b] = factors.encode;
  }
}

MINIFLOAT_INLINE void store_scales(const OperandPlan& plan, const TileRange& range,
                                   std::int64_t block_row, const BlockRow& blocks) {
  const Spec& spec = plan.operand.spec;
  const std::int64_t first = range.col / spec.block_cols;
  const std::int64_t at = (range.batch * plan.scale_rows + block_row) * plan.scale_cols + first;
  const std::int64_t inside = plan.scale_cols - first;
  const std::int64_t count =
      inside < kTileCols / spec.block_cols ? inside : kTileCols / spec.block_cols;
  for (std::int64_t b = 0; b < count; ++b) {
    if (spec.rule == ScaleRule::kBlock)
      static_cast<float*>(plan.operand.scale)[at + b] = blocks.scale[b];
    else
      static_cast<std::uint8_t*>(plan.operand.scale)[at + b] =
          static_cast<std::uint8_t>(blocks.code[b]);
  }
}

// Each element's 16 random bits, a row of the tile: (kTileCols)
template <int FormatBits>
MINIFLOAT_INLINE void row_random_bits(const OperandPlan& plan, std::uint32_t row,
                                      std::uint32_t group, std::uint32_t* bits) {
  constexpr int kGroups = kTileCols / kElementsPerCall;
  std::uint32_t words[kGroups * 4];
  for (int g = 0; g < kGroups; ++g) {
    const Words w = random_words(plan.key, plan.stream, row, group + static_cast<std::uint32_t>(g));
    for (int i = 0; i < 4; ++i) words[4 * g + i] = w.w[i];
  }
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

// Elements of one tile row, all kTileCols of them. v: (kTileCols), multiplied by their factors already.
template <class F, bool kStochastic>
MINIFLOAT_INLINE void encode_row(const float* v, const std::uint32_t* bits, std::uint8_t* codes) {
  for (std::int64_t c = 0; c < kTileCols; ++c) {
    if constexpr (kStochastic)
      codes[c] = static_cast<std::uint8_t>(encode<F, Stochastic>(v[c], {bits[c]}));
    else
      codes[c] = static_cast<std::uint8_t>(encode<F>(v[c]));
  }
}

template <int Width>
MINIFLOAT_INLINE void multiply_blocks(float* row, const float* factor) {
  for (std::int64_t b = 0; b < kTileCols / Width; ++b)
    for (int i = 0; i < Width; ++i) row[b * Width + i] *= factor[b];
}

// Multiplies a row by its blocks' factors. Under +delayed an infinite element becomes NaN; NVFP4 blocks of
// scale 0 become zero.
MINIFLOAT_INLINE void scale_row(const Spec& spec, const BlockRow& blocks, int width, float* row) {
  if (spec.delayed)
    for (std::int64_t c = 0; c < kTileCols; ++c)
      row[c] = is_finite(magnitude_bits(row[c])) ? row[c] : nan_value();
  if (width == 16) multiply_blocks<16>(row, blocks.factor);
  if (width == 32) multiply_blocks<32>(row, blocks.factor);
  if (width == 128) multiply_blocks<128>(row, blocks.factor);
  if (spec.rule != ScaleRule::kNvfp4) return;
  for (int b = 0; b < kMaxBlocks; ++b)
    if (blocks.code[b] == 0)
      for (int i = 0; i < 16; ++i) row[16 * b + i] = 0.0f;
}

template <class F>
MINIFLOAT_INLINE void store_row(const OperandPlan& plan, const TileRange& range, std::int64_t r,
                                const BlockRow& blocks, int width, const std::uint8_t* codes) {
  const std::int64_t inside =
      plan.padded - range.col < kTileCols ? plan.padded - range.col : kTileCols;
  const std::int64_t row = range.batch * plan.rows + range.row + r;
  std::uint8_t* out = plan.operand.codes + row * plan.code_pitch;
  if constexpr (F::kBits == 4) {
    std::uint8_t packed[kTileCols / 2];
    for (std::int64_t i = 0; i < kTileCols / 2; ++i)
      packed[i] = pack_nibbles(codes[2 * i], codes[2 * i + 1]);
    if (inside % 2) packed[inside / 2] &= 0x0F;
    __builtin_memcpy(out + range.col / 2, packed, static_cast<std::size_t>((inside + 1) / 2));
  } else {
    __builtin_memcpy(out + range.col, codes, static_cast<std::size_t>(inside));
  }
  if (!plan.operand.decoded) return;
  std::uint16_t values[kTileCols];
  float scale[kTileCols];
  for (std::int64_t c = 0; c < kTileCols; ++c) scale[c] = blocks.scale[c / width];
  for (std::int64_t c = 0; c < kTileCols; ++c)
    values[c] = product_value(decode<F>(codes[c]) * scale[c]);
  __builtin_memcpy(plan.operand.decoded + row * plan.padded + range.col, values,
                   static_cast<std::size_t>(inside) * sizeof(std::uint16_t));
}

template <class F, bool kStochastic>
struct EncodeTile {
  MINIFLOAT_INLINE static void run(const EncodeArgs& args) {
    const OperandPlan& plan = *args.plan;
    const TileRange& range = *args.range;
    const Spec& spec = plan.operand.spec;
    const int width = spec.has_blocks() ? spec.block_cols : static_cast<int>(kTileCols);
    const std::int64_t height = spec.has_blocks() ? spec.block_rows : 1;
    alignas(64) std::uint8_t codes[kTileCols];
    alignas(64) std::uint32_t bits[kTileCols] = {};
    BlockRow blocks = {};

    for (std::int64_t first = 0; first < range.rows; first += height) {
      const std::int64_t last = first + height < range.rows ? first + height : range.rows;
      if (spec.has_blocks()) {
        block_row_amax(*args.tile, first, last, width, blocks);
        block_scales<F>(plan, range.batch, blocks);
        store_scales(plan, range, (range.row + first) / height, blocks);
      } else {
        const bool whole = spec.rule == ScaleRule::kTensor;
        const Factors factors = whole ? plan.tensor[range.batch]
                                      : plan.row[range.batch * plan.rows + range.row + first];
        const bool owed = whole || spec.scale_rounding == ScaleRounding::kExact;
        blocks.factor[0] = factors.encode;
        blocks.scale[0] = owed ? 1.0f : factors.scale;
      }
      for (std::int64_t r = first; r < last; ++r) {
        if constexpr (kStochastic)
          row_random_bits<F::kBits>(
              plan,
              static_cast<std::uint32_t>(plan.operand.origin.row + range.batch * plan.rows +
                                         range.row + r),
              static_cast<std::uint32_t>((plan.operand.origin.col + range.col) / kElementsPerCall),
              bits);
        scale_row(spec, blocks, width, args.tile->row(r));
        encode_row<F, kStochastic>(args.tile->row(r), bits, codes);
        store_row<F>(plan, range, r, blocks, width, codes);
      }
    }
  }
};

}  // namespace minifloat::cpu
