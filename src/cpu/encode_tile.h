// A tile of values -> codes, block scales and, where wanted, the values of the codes.
//
//     1  amax of each block, its scale, the factor of its elements  block_scale.h, choose_scale.h,
//                                                               correct_scales.h
//     2  every element: multiply, encode                            a row at a time
//     3  store what lies inside the operand
#pragma once

#include <cstdint>

#include "block_scale.h"
#include "choose_scale.h"
#include "correct_scales.h"
#include "encode_fast.h"
#include "minifloat/core/philox.h"
#include "minifloat/core/scale_rule.h"
#include "minifloat/quantize.h"
#include "tile.h"

namespace minifloat::cpu {

template <class T>
struct EncodeArgs {
  const OperandPlan* plan;
  const TileRange* range;
  TileView<T> tile;
};

// Computes core/philox.h's random_bits for 16 elements from their 4 words and the reversed words.
// Even elements take the word, odd ones the reversal. After a shift of two of four, all take the
// same bytes.
template <int FormatBits>
MINIFLOAT_INLINE void spread_bits(const LaneBits& words, const LaneBits& reversed, LaneBits& bits) {
  constexpr std::uint32_t s = FormatBits == 4 ? 8 : 16;
  constexpr LaneBits kShift = {s, 0, 0, s, s, 0, 0, s, s, 0, 0, s, s, 0, 0, s};
  const LaneBits from = __builtin_shufflevector(words, reversed, 0, 16, 0, 16, 1, 17, 1, 17, 2, 18,
                                                2, 18, 3, 19, 3, 19);
  const LaneBits shifted = from << kShift;
  if constexpr (FormatBits == 4)
    bits = (shifted & 0xFF00'0000u) | ((shifted & 0x0000'FF00u) << 8);
  else
    bits = shifted & 0xFFFF'0000u;
}

// Computes the 16 random bits of each element of a tile row, (kTileCols).
template <int FormatBits>
MINIFLOAT_INLINE void row_random_bits(const OperandPlan& plan, std::uint32_t row,
                                      std::uint32_t group, std::uint32_t* bits) {
  constexpr int kGroups = kTileCols / kElementsPerCall;
  std::uint64_t by_word[4][kGroups];  // the calls of a row side by side, a 64-bit lane each
  for (int g = 0; g < kGroups; ++g) {
    const auto w = random_bits_at<std::uint64_t>(plan.random.key, plan.random.stream, row,
                                                 group + static_cast<std::uint32_t>(g));
    for (int i = 0; i < 4; ++i) by_word[i][g] = w.w[i];
  }
  std::uint32_t words[kGroups * 4 + 16],
      reversed[kGroups * 4 + 16];  // read a whole vector at a time
  for (int g = 0; g < kGroups; ++g)
    for (int i = 0; i < 4; ++i) words[4 * g + i] = static_cast<std::uint32_t>(by_word[i][g]);
  for (int j = 0; j < kGroups * 4; ++j) reversed[j] = reverse_bits(words[j]);
  for (int g = 0; g < kGroups; ++g) {
    LaneBits w, v, out;
    __builtin_memcpy(&w, words + 4 * g, sizeof w);
    __builtin_memcpy(&v, reversed + 4 * g, sizeof v);
    spread_bits<FormatBits>(w, v, out);
    __builtin_memcpy(bits + kElementsPerCall * g, &out, sizeof out);
  }
}

// Encodes the elements of one tile row, all kTileCols of them, none of them NaN.
template <class F, class T, bool kStochastic>
MINIFLOAT_INLINE void encode_numbers(const T* __restrict row, const float* __restrict factor,
                                     const std::uint32_t* __restrict bits,
                                     std::uint8_t* __restrict codes) {
  for (std::int64_t c = 0; c < kTileCols; ++c) {
    const float v = to_float(row[c]) * factor[c];
    codes[c] = static_cast<std::uint8_t>(kStochastic ? encode_stochastic<F>(v, bits[c])
                                                     : encode_nearest_number<F>(v));
  }
}

// Encodes any elements of one tile row. Under +delayed an infinite one becomes NaN.
template <class F, class T, bool kStochastic>
MINIFLOAT_INLINE void encode_any(const T* __restrict row, const float* __restrict factor,
                                 const std::uint32_t* __restrict bits, bool delayed,
                                 std::uint8_t* __restrict codes) {
  for (std::int64_t c = 0; c < kTileCols; ++c) {
    const float v = value_to_encode(to_float(row[c]), delayed) * factor[c];
    codes[c] = static_cast<std::uint8_t>(kStochastic ? encode_stochastic<F>(v, bits[c])
                                                     : encode_nearest<F>(v));
  }
}

// Stores `inside` of Whole elements: in nearly all cases all of them, a copy of a constant size.
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
  const std::int64_t col = range.col_of(r), left = plan.padded - col;
  const std::int64_t inside = left < kTileCols ? left : kTileCols;
  std::uint8_t* out =
      plan.operand.codes + (range.batch * plan.rows + range.row_of(r)) * plan.code_pitch;
  if constexpr (F::kBits == 4) {
    std::uint8_t packed[kTileCols / 2];
    for (std::int64_t i = 0; i < kTileCols / 2; ++i)
      packed[i] = pack_nibbles(codes[2 * i], codes[2 * i + 1]);
    if (inside % 2) packed[inside / 2] &= 0x0F;
    store_inside<kTileCols / 2>(packed, out + col / 2, (inside + 1) / 2);
  } else {
    store_inside<kTileCols>(codes, out + col, inside);
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
  const std::int64_t col = range.col_of(r), left = plan.padded - col;
  const std::int64_t inside = left < kTileCols ? left : kTileCols;
  float spread[kTileCols];
  std::uint16_t values[kTileCols];
  spread_blocks<Width>(scale, spread);
  decode_row<F>(codes, spread, values);
  const std::int64_t row = range.batch * plan.rows + range.row_of(r);
  store_inside<kTileCols>(values, plan.operand.decoded + row * plan.pitch() + col, inside);
}

// The rounding is looked up once a row, and not compiled into the body, of which each vector unit
// has a copy. The width of blocks is: the compiler then keeps a row's factors in registers.
template <class F, class T>
struct EncodeTile {
  MINIFLOAT_INLINE static void run(const EncodeArgs<T>& args) {
    const OperandPlan& plan = *args.plan;
    const Spec& spec = plan.operand.spec;
    TileBlocks blocks(spec, args.range->rows);
    if (spec.has_blocks()) {
      block_amax(args.tile, args.range->rows, blocks);
      if constexpr (kHasRulesOfValues<F>)
        if (has_two_scales(spec.scale_rounding))
          choose_scales<F>(plan, *args.range, args.tile, blocks);
      block_scales<F>(plan, *args.range, blocks);
      if constexpr (kHasRulesOfValues<F>)
        if (spec.is_eden()) correct_scales<F>(plan, *args.range, args.tile, blocks);
      store_scales(plan, *args.range, blocks);
    } else {
      fixed_scales(plan, *args.range, blocks);
    }
    note_exceptions(spec, blocks);
    // 4-bit formats have blocks of 16 or 32, FP8 of 32 or a whole tile row.
    constexpr int kNarrow = F::kBits == 4 ? 16 : 32, kWide = F::kBits == 4 ? 32 : kTileCols;
    if (blocks.cols == kTileCols / kNarrow)
      encode_rows<kNarrow>(args, blocks);
    else
      encode_rows<kWide>(args, blocks);
  }

  template <int Width>
  MINIFLOAT_INLINE static void encode_rows(const EncodeArgs<T>& args, const TileBlocks& blocks) {
    const OperandPlan& plan = *args.plan;
    const TileRange& range = *args.range;
    const Operand& operand = plan.operand;
    const bool stochastic = operand.spec.rounds_codes_stochastically();
    // Only a block with a NaN amax holds a NaN, except where the scale comes from another amax.
    const bool numbers = !blocks.any_nan && (operand.spec.has_blocks() || !operand.given_amax);
    alignas(64) std::uint8_t codes[kTileCols];
    alignas(64) std::uint32_t bits[kTileCols];
    alignas(64) float factor[kTileCols];
    for (std::int64_t r = 0; r < range.rows; ++r) {
      const std::int64_t first = blocks.first_of_row(r);
      args.tile.prefetch(r);
      if (stochastic)
        row_random_bits<F::kBits>(
            plan, counter_row(plan, range.batch, range.row_of(r)),
            static_cast<std::uint32_t>((operand.origin.col + range.col_of(r)) / kElementsPerCall),
            bits);
      spread_blocks<Width>(blocks.factor + first, factor);
      if (stochastic)
        encode_row<true>(args.tile.row(r), factor, bits, numbers, operand.spec.delayed, codes);
      else
        encode_row<false>(args.tile.row(r), factor, bits, numbers, operand.spec.delayed, codes);
      if (blocks.any_zero)
        for (std::int64_t b = 0; b < kTileCols / Width; ++b)
          if (has_zero_codes(operand.spec.rule, blocks.code[first + b]))
            __builtin_memset(codes + b * Width, 0, Width);
      if (operand.codes) store_row<F>(plan, range, r, codes);
      if (operand.decoded) store_decoded<F, Width>(plan, range, r, blocks.scale + first, codes);
    }
  }

  template <bool kStochastic>
  MINIFLOAT_INLINE static void encode_row(const T* row, const float* factor,
                                          const std::uint32_t* bits, bool numbers, bool delayed,
                                          std::uint8_t* codes) {
    if (numbers)
      encode_numbers<F, T, kStochastic>(row, factor, bits, codes);
    else
      encode_any<F, T, kStochastic>(row, factor, bits, delayed, codes);
  }
};

}  // namespace minifloat::cpu
