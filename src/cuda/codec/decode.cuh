// 16 codes -> values, and the bf16 values that an exact product reads.
#pragma once

#include <cstdint>

#include "cuda/codec/encode.cuh"

namespace minifloat::cuda {

// Decodes a vec16's codes. A NaN gives a NaN, of any bits.
template <class F>
__device__ __forceinline__ void decode_vec(const Codes<F>& codes, float (&v)[kVec]) {
  if constexpr (F::kBits == 4) {
    // The code's magnitude on top of a float's mantissa is 2^-126 of its value.
    constexpr int kAt = Float32::kMantissaBits - F::kMantissaBits;
    static_assert(F::kMinExponent == 0);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const std::uint32_t w = codes.w[i / 8];
      const int at = i % 8 * 4;
      const std::uint32_t magnitude = at <= kAt ? w << (kAt - at) : w >> (at - kAt);
      const std::uint32_t sign = w << (28 - at);
      v[i] = bit_cast<float>((magnitude & 0x7u << kAt) | (sign & 0x8000'0000u)) * 0x1p126f;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec; i += 2) {
      const std::uint32_t pair = codes.w[i / 4] >> (i % 4 * 8);
      const float2 two = kIsE4m3<F> ? decode_e4m3x2(pair) : decode_e5m2x2(pair);
      v[i] = two.x, v[i + 1] = two.y;
    }
  }
}

// Decodes a vec16's codes to 2^-kDecodedShift<F> of their values. A 4-bit code's magnitude on top
// of the mantissa of a half, which may be subnormal, is 2^-14 of its value: codes i and i + 4 take
// a word of halves.
template <class F>
inline constexpr int kDecodedShift = F::kBits == 4 ? 14 : 0;
template <class F>
__device__ __forceinline__ void decode_shifted(const Codes<F>& codes, float (&v)[kVec]) {
  if constexpr (F::kBits == 4) {
    constexpr int kAt = 10 - F::kMantissaBits;  // of a half's 10 bits of mantissa
    static_assert(F::kMinExponent == 0);
#pragma unroll
    for (int first = 0; first < kVec; first += 8) {
      const std::uint32_t w = codes.w[first / 8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t magnitude = 4 * i <= kAt ? w << (kAt - 4 * i) : w >> (4 * i - kAt);
        const std::uint32_t sign = w << (12 - 4 * i);
        const float2 two =
            cvt_f16x2((magnitude & 0x0001'0001u * (0x7u << kAt)) | (sign & 0x8000'8000u));
        v[first + i] = two.x, v[first + i + 4] = two.y;
      }
    }
  } else {
    decode_vec<F>(codes, v);
  }
}

// The table from a 4-bit format to bf16: 16 bits for each of the eight magnitudes, the lower and
// the upper bytes apart, as the byte permutation reads them.
struct Bf16Table {
  std::uint32_t low[2], high[2];
};
// Builds the table.   pairs: the values of magnitudes 2i (lower half) and 2i + 1
__device__ __forceinline__ Bf16Table bf16_table(const std::uint32_t (&pairs)[4]) {
  Bf16Table table;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    table.low[i] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], 0x6420);
    table.high[i] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], 0x7531);
  }
  return table;
}
// Builds the table of a format.   both(low, high): the word of two magnitudes' values
template <class F, class Both>
__device__ __forceinline__ Bf16Table bf16_table_of(Both both) {
  return bf16_table({both(decode<F>(0), decode<F>(1)), both(decode<F>(2), decode<F>(3)),
                     both(decode<F>(4), decode<F>(5)), both(decode<F>(6), decode<F>(7))});
}
// Looks up four codes in the low nibbles of w: two words of bf16.
__device__ __forceinline__ void look_up_four(const Bf16Table& table, std::uint32_t w,
                                             std::uint32_t (&out)[2]) {
  const std::uint32_t magnitude = w & 0x7777u;
  const std::uint32_t low = __byte_perm(table.low[0], table.low[1], magnitude);
  // The byte is 0x80 for a selector of 0; a selector of 8 fills it with that byte's sign.
  const std::uint32_t sign = (permute_bytes(0x80u, 0u, w & 0x8888u) << 1) & 0x8080'8080u;
  const std::uint32_t high = __byte_perm(table.high[0], table.high[1], magnitude) ^ sign;
  out[0] = __byte_perm(low, high, 0x5140), out[1] = __byte_perm(low, high, 0x7362);
}
template <class F>
__device__ __forceinline__ void look_up(const Bf16Table& table, const Codes<F>& codes,
                                        std::uint32_t (&out)[kVec / 2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    std::uint32_t two[2];
    look_up_four(table, codes.w[i / 2] >> (i % 2 * 16), two);
    out[2 * i] = two[0], out[2 * i + 1] = two[1];
  }
}

// Returns whether a vec16 holds a code that is not a finite number.
template <class F>
__device__ __forceinline__ bool has_special(const Codes<F>& codes) {
  if constexpr (F::kBits == 4) {
    return false;
  } else {
    constexpr std::uint32_t kFinite =
        0x7Fu - F::kMaxBits;  // the term that moves codes past kMaxBits to bit 7
    std::uint32_t special = 0;
#pragma unroll
    for (const std::uint32_t w : codes.w) special |= (w & 0x7F7F'7F7Fu) + kFinite * 0x0101'0101u;
    return special & 0x8080'8080u;
  }
}

// Stores those of 16 elements of a row, from `col` on, that lie before `end`: as the words of
// all(), or each by one(code).
template <class F, class Out, class All, class One>
__device__ __forceinline__ void store_values(Codes<F> codes, bool at_once, Out* row,
                                             std::uint32_t col, std::uint32_t end, All all,
                                             One one) {
  row += col;
  if (at_once && col + kVec <= end) {
    constexpr int kWords = kVec * static_cast<int>(sizeof(Out)) / 4;
    std::uint32_t w[kWords];
    all(w);
#pragma unroll
    for (int i = 0; i < kWords; i += 4)
      *reinterpret_cast<uint4*>(reinterpret_cast<std::uint32_t*>(row) + i) =
          make_uint4(w[i], w[i + 1], w[i + 2], w[i + 3]);
    return;
  }
#pragma unroll 1
  for (std::uint32_t i = 0; i < kVec && col + i < end; ++i, codes.pop()) row[i] = one(codes[0]);
}

// Stores code * scale in bf16, as docs/numerics.md defines it for exact products.
template <class F>
__device__ __forceinline__ void store_product_values(const Codes<F>& codes, float scale, Bf16* row,
                                                     std::uint32_t col, std::uint32_t end,
                                                     bool aligned) {
  // Far from the ends of the range every product is normal. The product is a bf16, except where the
  // scale is no power of two: then the rest of its bits is cut off, as in product_value.
  const bool normal = scale >= 0x1p-100f && scale <= 0x1p100f && !has_special(codes);
  store_values<F>(
      codes, aligned && normal, row, col, end,
      [&](std::uint32_t (&w)[kVec / 2]) {
        const auto cut = [&](float low, float high) {
          return __byte_perm(bit_cast<std::uint32_t>(low * scale),
                             bit_cast<std::uint32_t>(high * scale), 0x7632);
        };
        if constexpr (F::kBits == 4) {
          look_up(bf16_table_of<F>(cut), codes, w);
        } else {
          float v[kVec];
          decode_vec<F>(codes, v);
#pragma unroll
          for (int i = 0; i < kVec / 2; ++i) w[i] = cut(v[2 * i], v[2 * i + 1]);
        }
      },
      [&](std::uint32_t code) {
        return static_cast<Bf16>(product_value(decode<F>(code) * scale));
      });
}

}  // namespace minifloat::cuda
