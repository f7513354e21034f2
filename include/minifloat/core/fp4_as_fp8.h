// E2M1 codes under scales 2^k as E4M3 codes of the same values, which an FP8 product multiplies.
//
//     row of an operand as read:   | 2^k0: codes | 2^k1: codes | ...      K = max k
//     as FP8                       e4m3(code * 2^(k - K + 6)) ...        one factor 2^(K - 6) a row
//
// E2M1's largest value becomes 6 * 2^6 = 384 of 448. Its smallest step becomes 0.5 * 2^(k - K + 6),
// a multiple of E4M3's smallest value 2^-9 while k >= K - 14: codes are exact there, without a
// double rounding. Below, they are rounded to nearest even, within 2^-10.
#pragma once

#include <cstdint>

#include "minifloat/core/format.h"
#include "minifloat/core/host_device.h"
#include "minifloat/core/rounding.h"
#include "minifloat/core/scaling.h"

namespace minifloat {

inline constexpr int kFp4AsFp8Top = 6;          // 6 * 2^6 <= 448 < 6 * 2^7
inline constexpr int kFp4AsFp8ExactRange = 14;  // binades below the row's largest scale
// The least K, so that 2^(K - 6) is a normal float.
inline constexpr int kFp4AsFp8MinExponent = -120;
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
MINIFLOAT_HD constexpr int fp4_row_exponent(int largest) {
  if (largest <= kFp4AsFp8Nan) return 0;
  return largest > kFp4AsFp8MinExponent ? largest : kFp4AsFp8MinExponent;
}

// Returns 2^(K - 6) times the tensor's scale, which is 1 for MX.
MINIFLOAT_HD constexpr float fp4_as_fp8_row_scale(int row_exponent, float tensor_scale) {
  return decode_e8m0(static_cast<std::uint32_t>(row_exponent - kFp4AsFp8Top + E8M0::kBias)) *
         tensor_scale;
}

// Returns 2^(k - K + 6), the factor of a block's values. It is at least 2^-20: below that all
// values become zero.
MINIFLOAT_HD constexpr float fp4_as_fp8_factor(int k, int row_exponent) {
  constexpr int kLow = -kFp4AsFp8Top - kFp4AsFp8ExactRange;
  const int shift = k - row_exponent + kFp4AsFp8Top > kLow ? k - row_exponent + kFp4AsFp8Top : kLow;
  return decode_e8m0(static_cast<std::uint32_t>(shift + E8M0::kBias));
}

// Returns the E4M3 code of an E2M1 code in a block of exponent k. Under a NaN scale: NaN. Under a
// zero scale: the code's signed zero.
MINIFLOAT_HD constexpr std::uint32_t fp4_as_fp8_code(std::uint32_t code, int k, int row_exponent) {
  if (k == kFp4AsFp8Nan) return E4M3::kNanBits;
  return encode<E4M3>(decode<E2M1>(code) * fp4_as_fp8_factor(k, row_exponent));
}

static_assert(fp4_as_fp8_code(0x7, 3, 3) == encode<E4M3>(384.0f) &&
              fp4_as_fp8_code(0xF, 3, 3) == 0xFC);
static_assert(fp4_as_fp8_code(0x1, -14, 0) == 0x01 && fp4_as_fp8_code(0x1, -15, 0) == 0x00);
static_assert(fp4_as_fp8_code(0x9, kFp4AsFp8Zero, 0) == 0x80);

}  // namespace minifloat
