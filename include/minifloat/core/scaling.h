// Block amax -> scale, one function a rule. Each states the result of zero, infinity, NaN, overflow
// and underflow. `amax` is always the bit pattern of max |x| (magnitude_bits): ordered like the
// values, NaN above infinity, so that an integer max over a block keeps a NaN (fmaxf drops it).
//
// Everywhere: element code = encode(fl32(x * encode factor)), value of a code = code * scale.
#pragma once

#include <cstdint>

#include "minifloat/core/format.h"
#include "minifloat/core/host_device.h"
#include "minifloat/core/rounding.h"

namespace minifloat {

MINIFLOAT_HD constexpr std::uint32_t magnitude_bits(float x) {
  return bit_cast<std::uint32_t>(x) & Float32::kMagnitude;
}
MINIFLOAT_HD constexpr bool is_finite(std::uint32_t magnitude) {
  return magnitude < Float32::kExponent;
}
MINIFLOAT_HD constexpr float nan_value() { return bit_cast<float>(Float32::kNanBits); }
MINIFLOAT_HD constexpr float at_most_float_max(float x) {  // NaN passes
  return x > Float32::kMax ? Float32::kMax : x;
}

// Returns the value that is encoded for x: x, except NaN for each NaN, and NaN for the infinities
// under delayed scaling, whose amax is of earlier steps.
MINIFLOAT_HD constexpr float value_to_encode(float x, bool delayed) {
  const std::uint32_t first_nan = Float32::kExponent + (delayed ? 0u : 1u);
  return magnitude_bits(x) >= first_nan ? nan_value() : x;
}

// Returns the bf16 that an exact product reads of a value: zero below 2^-126, saturated above
// bf16's largest, cut to bf16's bits.
MINIFLOAT_HD constexpr std::uint16_t product_value(float v) {
  constexpr std::uint32_t kMax = bit_cast<std::uint32_t>(BF16::kMax);
  const std::uint32_t bits = bit_cast<std::uint32_t>(v), magnitude = bits & Float32::kMagnitude;
  if (magnitude > Float32::kExponent) return BF16::kNanBits;
  const std::uint32_t clamped = magnitude < kMax ? magnitude : kMax;
  const std::uint32_t normal = magnitude < Float32::kImplicitBit ? 0u : clamped;
  return static_cast<std::uint16_t>((normal | (bits & ~Float32::kMagnitude)) >> 16);
}

// The factor that elements are multiplied by before encoding, and the scale that undoes it.
struct ScaleFactors {
  float encode;
  float scale;
};

// Returns the factors of a tensor, a row, a 1x128 or a 128x128 block: encode = min(max / amax,
// FLT_MAX), by IEEE division, rounded down to a power of two where `power_of_two`, so that nothing
// saturates; scale = 1 / encode.
//   zero amax: both 1.   Inf or NaN amax: both NaN.
//   amax so small that max / amax overflows: encode is FLT_MAX (2^127 as a power of two), and the
//   scale is subnormal.   No amax is so large that encode is 0.
template <class F>
MINIFLOAT_HD constexpr ScaleFactors fp8_factors(std::uint32_t amax, bool power_of_two) {
  const float quotient = F::kMax / bit_cast<float>(amax | (amax == 0u ? 1u : 0u));
  const float full = at_most_float_max(quotient);
  const float down = bit_cast<float>(bit_cast<std::uint32_t>(full) & Float32::kExponent);
  float encode = power_of_two ? down : full;
  encode = amax == 0 ? 1.0f : encode;
  const float scale = 1.0f / encode;  // of NaN: the device's default NaN
  return {is_finite(amax) ? encode : nan_value(), is_finite(amax) ? scale : nan_value()};
}

// MX (OCP Microscaling v1.0), E8M0 scale 2^(code - 127), as cuBLAS rounds it: up, to the smallest
// power of two s with amax / s <= max.
//   zero block: code 0, 2^-127.   Inf or NaN: the NaN code 0xFF.   underflow: code 0.
//   overflow: an amax past max * 2^127, which only E1M2 leaves room for: code 254, 2^127.
template <class F>
MINIFLOAT_HD constexpr std::uint32_t mx_scale_up(std::uint32_t amax) {
  constexpr std::uint32_t kMax = bit_cast<std::uint32_t>(F::kMax);
  constexpr int kEmax = static_cast<int>(kMax >> Float32::kMantissaBits) - Float32::kBias;
  // A mantissa past max's carries into the exponent.
  const std::uint32_t carried = amax + (Float32::kMantissa - (kMax & Float32::kMantissa));
  const int e = static_cast<int>(carried >> Float32::kMantissaBits) - kEmax;
  std::uint32_t code = static_cast<std::uint32_t>(e > 0 ? e : 0);
  if constexpr (kEmax == 0) {  // a denormal amax may be past max * 2^-127, the first code's
    constexpr std::uint32_t kFirst = (Float32::kImplicitBit | (kMax & Float32::kMantissa)) >> 1;
    const std::uint32_t at_most = code < E8M0::kMaxBits ? code : E8M0::kMaxBits;
    code = amax < Float32::kImplicitBit ? (amax > kFirst ? 1u : 0u) : at_most;
  }
  return is_finite(amax) ? code : E8M0::kNanBits;
}

// The E8M0 code of mx_scale_up by an instruction that rounds a float up to a power of two and gives
// its code, at most 254 (cvt.rp.satfinite.ue8m0x2): mx_scale_of_rounded of the instruction's result
// for mx_quotient.
//
//     mx_quotient     fl32(amax * fl32(2^(emax - 1) / max)), on the same side of each power of two
//                     as the exact quotient, wherever it is normal; 2^(emax - 1) times too large,
//                     for both ends:
//     at the top      the largest amax rounds up to 2^127, code 254, just before saturation
//     at the bottom   subnormal quotients round to code 0 or 1; emax - 1 codes below, all is 0
//
// So emax is 1 or more: not E1M2's.
// tests/core visits every bf16 amax, and the target `exhaustive` every float.
template <class F>
MINIFLOAT_HD constexpr float mx_quotient(std::uint32_t amax) {
  return bit_cast<float>(amax) * (F::kMaxPowerOfTwo / 2 / F::kMax);
}
template <class F>
MINIFLOAT_HD constexpr std::uint32_t mx_scale_of_rounded(std::uint32_t rounded,
                                                         std::uint32_t amax) {
  constexpr int kEmax =
      static_cast<int>(bit_cast<std::uint32_t>(F::kMaxPowerOfTwo) >> Float32::kMantissaBits) -
      Float32::kBias;
  static_assert(kEmax >= 1);
  const int e = static_cast<int>(rounded) - (kEmax - 1);
  const std::uint32_t code = static_cast<std::uint32_t>(e > 0 ? e : 0);
  return is_finite(amax) ? code : E8M0::kNanBits;  // the instruction gives 254 for infinity
}

// MX, the rule of the OCP specification: 2^(floor(log2 amax) - emax). Elements between max and the
// next power of two saturate. Zero, Inf, NaN and underflow as in mx_scale_up.
template <class F>
MINIFLOAT_HD constexpr std::uint32_t mx_scale_floor(std::uint32_t amax) {
  constexpr std::uint32_t kMax = bit_cast<std::uint32_t>(F::kMax);
  constexpr int kEmax = static_cast<int>(kMax >> Float32::kMantissaBits) - Float32::kBias;
  const int e = static_cast<int>(amax >> Float32::kMantissaBits) - kEmax;
  const std::uint32_t code = static_cast<std::uint32_t>(e > 0 ? e : 0);
  return is_finite(amax) ? code : E8M0::kNanBits;
}

// Return 2^(code - 127) and its reciprocal: exact for every code that has a value; NaN for 0xFF.
MINIFLOAT_HD constexpr float decode_e8m0(std::uint32_t code) {
  const std::uint32_t bits = code == 0 ? 0x0040'0000u : code << Float32::kMantissaBits;
  return bit_cast<float>(code == E8M0::kNanBits ? Float32::kNanBits : bits);
}
MINIFLOAT_HD constexpr float e8m0_reciprocal(std::uint32_t code) {
  const std::uint32_t bits =
      code == E8M0::kMaxBits ? 0x0040'0000u : (E8M0::kMaxBits - code) << Float32::kMantissaBits;
  return bit_cast<float>(code == E8M0::kNanBits ? Float32::kNanBits : bits);
}

// The rounding of NVFP4's block scale to E4M3. NVFP4: 4-bit elements, an E4M3 scale a block, one
// fp32 scale a tensor, in Transformer Engine's order of operations. Its elements are E2M1; the
// rule of E1M2 is the same with that format's largest value in the place of 6.
enum class Nvfp4Rounding {
  kNearest,  // nearest even: a block's largest element may saturate, by up to 6% where s is normal
  kUp,       // up: no element saturates
  kPowerOfTwo,   // up to a power of two; the tensor scale makes the largest one 256
  kFourOverSix,  // nearest even of one of two scales (below); the largest becomes 256 or 384
  kEden,         // nearest even, before the correction of core/eden.h; the largest becomes 256
};
// The magnitude that a block's amax is encoded as under kEden: 6 / (17/16 * 0.93), which leaves the
// least error where larger ones saturate (arXiv 2601.22813).
inline constexpr float kEdenLargest = static_cast<float>(E2M1::kMax / (17.0 / 16.0 * 0.93));

// Tensor level: S = min(max * 448 / amax, FLT_MAX) multiplies block scales, and 1 / S is the
// tensor's scale. Under kPowerOfTwo, kFourOverSix and kEden 256 replaces 448; under kEden
// kEdenLargest replaces max.
//   zero amax: both 1.   Inf or NaN: both NaN.   tiny amax: S = FLT_MAX.
struct Nvfp4Tensor {
  float encode;        // S
  float scale;         // fl32(1 / S)
  float block_encode;  // fl32(S * fl32(1 / max)): amax of a block -> its scale before rounding
};
template <class F>
MINIFLOAT_HD constexpr Nvfp4Tensor nvfp4_tensor(std::uint32_t amax, Nvfp4Rounding rounding) {
  const bool fills_range = rounding == Nvfp4Rounding::kNearest || rounding == Nvfp4Rounding::kUp;
  const float top = fills_range ? E4M3::kMax : E4M3::kMaxPowerOfTwo;
  const float largest = rounding == Nvfp4Rounding::kEden ? kEdenLargest : F::kMax;
  float s = at_most_float_max(largest * top / bit_cast<float>(amax | (amax == 0u ? 1u : 0u)));
  s = amax == 0 ? 1.0f : s;
  s = is_finite(amax) ? s : nan_value();
  const float scale = 1.0f / s;
  return {s, is_finite(amax) ? scale : nan_value(), s * (1.0f / largest)};
}

// Block level: the E4M3 code of min(amax * block_encode, FLT_MAX).
//   zero block, or underflow to nearest: 0.   Inf or NaN in the block or the tensor: the NaN code.
//   past 448 (a passed tensor amax that was too small): 448, or 256 as a power of two.
MINIFLOAT_HD constexpr std::uint32_t nvfp4_block_scale(std::uint32_t amax, float block_encode,
                                                       Nvfp4Rounding rounding) {
  const float v = at_most_float_max(bit_cast<float>(amax) * block_encode);
  std::uint32_t code = 0;
  if (rounding == Nvfp4Rounding::kNearest || rounding == Nvfp4Rounding::kEden) {
    code = encode<E4M3>(v);
  } else if (rounding == Nvfp4Rounding::kUp) {
    code = encode<E4M3, AwayFromZero>(v);
  } else {
    const float capped = v > E4M3::kMaxPowerOfTwo ? E4M3::kMaxPowerOfTwo : v;
    const std::uint32_t bits = bit_cast<std::uint32_t>(capped);
    const std::uint32_t next = (bits + Float32::kMantissa) & Float32::kExponent;  // 2^ceil(log2)
    code = encode<E4M3, AwayFromZero>(bit_cast<float>(capped == capped ? next : bits));
  }
  return is_finite(amax) ? code : E4M3::kNanBits;
}

// Returns the factor of elements of a block whose scale code is s:
// min(1 / (float(s) * fl32(1 / S)), FLT_MAX). A code's value is fl32(code * s) * fl32(1 / S). A
// block whose s is 0 gets zero codes (its factor is unused).
MINIFLOAT_HD constexpr float nvfp4_encode_factor(std::uint32_t s, float tensor_scale) {
  return at_most_float_max(1.0f / (decode<E4M3>(s) * tensor_scale));
}

// Four Over Six (arXiv 2512.02010): a block's amax is encoded as 6, or, under a scale 6/4 times as
// large, as 4. Block level: the E4M3 code of min(amax / 6 * S, 448), or of 6/4 of it.
//   zero block, or underflow: 0.   Inf or NaN in the block or in the tensor: the NaN code.
MINIFLOAT_HD constexpr std::uint32_t four_over_six_scale(std::uint32_t amax, float tensor_encode,
                                                         bool is_four) {
  const float base = bit_cast<float>(amax) / E2M1::kMax * tensor_encode;
  const std::uint32_t code =
      encode<E4M3>(is_four ? base * (E2M1::kMax / E2M1::kMaxPowerOfTwo) : base);
  return is_finite(amax) ? code : E4M3::kNanBits;
}
// Returns a code's value for the comparison of the two scales: fl32(fl32(code * s) * amax of the
// tensor) / 1536.
MINIFLOAT_HD constexpr float four_over_six_value(float code, float s, float tensor_amax) {
  return code * s * tensor_amax / (E2M1::kMax * E4M3::kMaxPowerOfTwo);
}

// Delayed scaling: this step's active amax is computed from earlier steps.
enum class DelayedAmax { kMax, kMostRecent };

// Returns the largest, or the newest, finite nonzero entry times 2^margin. Where there is none (all
// zero, Inf or NaN), returns `previous`.
//   history: (length), newest first
MINIFLOAT_HD constexpr float delayed_amax(const float* history, int length, DelayedAmax algorithm,
                                          int margin, float previous) {
  std::uint32_t best = 0;
  for (int i = 0; i < length; ++i) {
    const std::uint32_t amax = magnitude_bits(history[i]);
    if (!is_finite(amax) || amax == 0) continue;
    if (algorithm == DelayedAmax::kMostRecent) {
      best = amax;
      break;
    }
    best = amax > best ? amax : best;
  }
  if (best == 0) return previous;
  float scaled = bit_cast<float>(best);
  for (int i = 0; i < margin; ++i) scaled = at_most_float_max(scaled * 2.0f);
  return scaled;
}

}  // namespace minifloat
