// 4-bit codes under scales 2^k as E4M3 codes of the same values, which an FP8 product multiplies.
//
//     row of an operand as read:   | 2^k0: codes | 2^k1: codes | ...      K = max k
//     as FP8                       e4m3(code * 2^(k - K + T)) ...        one factor 2^(K - T) a row
//
//            T    largest            smallest step          exact while
//     E2M1   6    6 * 2^6 = 384      0.5 * 2^(k - K + 6)    k >= K - 14
//     E1M2   8    1.75 * 2^8 = 448   0.25 * 2^(k - K + 8)   k >= K - 15
//
// T is the largest for which no code is past E4M3's 448. Codes are exact, without a double
// rounding, while the smallest step is a multiple of E4M3's smallest value 2^-9. Below, they are
// rounded to nearest even, within 2^-10.
#pragma once

#include <cstdint>

#include "minifloat/core/format.h"
#include "minifloat/core/host_device.h"
#include "minifloat/core/rounding.h"
#include "minifloat/core/scaling.h"

namespace minifloat {

// T: max * 2^T <= 448 < max * 2^(T + 1).
template <class F>
inline constexpr int kFp4AsFp8Top =
    static_cast<int>(bit_cast<std::uint32_t>(E4M3::kMax / F::kMax) >> Float32::kMantissaBits) -
    Float32::kBias;
// The binades below the row's largest scale in which codes are exact.
template <class F>
inline constexpr int kFp4AsFp8ExactRange = kFp4AsFp8Top<F> + (F::kMinExponent - F::kMantissaBits) -
                                           (E4M3::kMinExponent - E4M3::kMantissaBits);
// The least K, so that 2^(K - T) is a normal float.
template <class F>
inline constexpr int kFp4AsFp8MinExponent = kFp4AsFp8Top<F> - (Float32::kBias - 1);
// The "exponents" of scales that no row takes its K from: below any k, an E4M3 zero below a NaN.
inline constexpr int kFp4AsFp8Nan = -1000;
inline constexpr int kFp4AsFp8Zero = -2000;

// Return k of a block's scale. E8M0: 2^k for all codes except NaN. E4M3: the exponent of the power
// of two, or of the one below.
MINIFLOAT_HD constexpr int fp4_exponent_e8m0(std::uint32_t scale) {
  return scale == E8M0::kNanBits ? kFp4AsFp8Nan : static_cast<int>(scale) - E8M0::kBias;
}
MINIFLOAT_HD constexpr int fp4_exponent_of_value(float scale) {
  const std::uint32_t bits = magnitude_bits(scale);
  if (bits == 0) return kFp4AsFp8Zero;
  return is_finite(bits) ? static_cast<int>(bits >> Float32::kMantissaBits) - Float32::kBias
                         : kFp4AsFp8Nan;
}
MINIFLOAT_HD constexpr int fp4_exponent_e4m3(std::uint32_t scale) {
  return fp4_exponent_of_value(decode<E4M3>(scale));
}

// Returns K of a row, from the largest of its blocks' exponents: 0 where no block has one.
template <class F>
MINIFLOAT_HD constexpr int fp4_row_exponent(int largest) {
  if (largest <= kFp4AsFp8Nan) return 0;
  return largest > kFp4AsFp8MinExponent<F> ? largest : kFp4AsFp8MinExponent<F>;
}

// Returns 2^(K - T) times the tensor's scale, which is 1 for MX.
template <class F>
MINIFLOAT_HD constexpr float fp4_as_fp8_row_scale(int row_exponent, float tensor_scale) {
  return decode_e8m0(static_cast<std::uint32_t>(row_exponent - kFp4AsFp8Top<F> + E8M0::kBias)) *
         tensor_scale;
}

// Returns 2^(k - K + T), the factor of a block's values. It is at least 2^-20 (E1M2: 2^-23): there
// all values become zero.
template <class F>
MINIFLOAT_HD constexpr float fp4_as_fp8_factor(int k, int row_exponent) {
  constexpr int kLow = -kFp4AsFp8Top<F> - kFp4AsFp8ExactRange<F>;
  const int exponent = k - row_exponent + kFp4AsFp8Top<F>;
  const int shift = exponent > kLow ? exponent : kLow;
  return decode_e8m0(static_cast<std::uint32_t>(shift + E8M0::kBias));
}

// Returns the E4M3 code of a code of F in a block of exponent k. Under a NaN scale: NaN. Under a
// zero scale: the code's signed zero.
template <class F>
MINIFLOAT_HD constexpr std::uint32_t fp4_as_fp8_code(std::uint32_t code, int k, int row_exponent) {
  if (k == kFp4AsFp8Nan) return E4M3::kNanBits;
  return encode<E4M3>(decode<F>(code) * fp4_as_fp8_factor<F>(k, row_exponent));
}

static_assert(kFp4AsFp8Top<E2M1> == 6 && kFp4AsFp8ExactRange<E2M1> == 14 &&
              kFp4AsFp8MinExponent<E2M1> == -120);
static_assert(kFp4AsFp8Top<E1M2> == 8 && kFp4AsFp8ExactRange<E1M2> == 15 &&
              kFp4AsFp8MinExponent<E1M2> == -118);
static_assert(fp4_as_fp8_code<E2M1>(0x7, 3, 3) == encode<E4M3>(384.0f) &&
              fp4_as_fp8_code<E2M1>(0xF, 3, 3) == 0xFC);
static_assert(fp4_as_fp8_code<E2M1>(0x1, -14, 0) == 0x01 &&
              fp4_as_fp8_code<E2M1>(0x1, -15, 0) == 0x00);
static_assert(fp4_as_fp8_code<E1M2>(0x7, 3, 3) == E4M3::kMaxBits &&
              fp4_as_fp8_code<E1M2>(0x1, -15, 0) == 0x01);
static_assert(fp4_as_fp8_code<E2M1>(0x9, kFp4AsFp8Zero, 0) == 0x80);

}  // namespace minifloat
