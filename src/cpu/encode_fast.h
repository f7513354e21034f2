// core/rounding.h's encode in fewer steps, for the loops that spend most of their time in it. Both
// are equal for each float and each 16 random bits: tests/cpu/encode_fast_test.cpp samples them,
// and tests/cpu/exhaustive_encode_fast.cpp visits all.
#pragma once

#include <cstdint>

#include "minifloat/core/rounding.h"
#include "targets.h"

namespace minifloat::cpu {

// The bits of 2^Emin, and the code of its exponent field.
template <class F>
struct Lowest {
  static constexpr int kDiscarded = Float32::kMantissaBits - F::kMantissaBits;
  static constexpr std::uint32_t kBits =
      static_cast<std::uint32_t>(F::kMinExponent + Float32::kBias) << Float32::kMantissaBits;
  static constexpr std::uint32_t kCode = kBits >> kDiscarded;
};

// Adds sign and NaN to a code, for both roundings.
template <class F>
MINIFLOAT_INLINE std::uint32_t finish_code(std::uint32_t bits, std::uint32_t code) {
  const std::uint32_t sign = (bits >> (32 - F::kBits)) & F::kSignBit;
  return (bits & Float32::kMagnitude) > Float32::kExponent ? F::kNanBits : code | sign;
}

template <class F>
MINIFLOAT_INLINE std::uint32_t clamp_magnitude(std::uint32_t bits) {
  constexpr std::uint32_t kMax = bit_cast<std::uint32_t>(F::kMax);
  const std::uint32_t magnitude = bits & Float32::kMagnitude;
  return magnitude < kMax ? magnitude : kMax;
}

// Encodes to nearest even, by the adder. P: the power of two below the value, or the format's
// lowest. In the binade of P * 2^(23 - M) a float's last place is P * 2^-M, the format's quantum.
// The sum therefore rounds there, and its bits count quanta from that power on.
template <class F>
MINIFLOAT_INLINE std::uint32_t encode_nearest(float x) {
  using L = Lowest<F>;
  const std::uint32_t bits = bit_cast<std::uint32_t>(x);
  const std::uint32_t a = clamp_magnitude<F>(bits);
  const std::uint32_t p = (a > L::kBits ? a : L::kBits) & Float32::kExponent;
  const std::uint32_t anchor =
      p + (static_cast<std::uint32_t>(L::kDiscarded) << Float32::kMantissaBits);
  const std::uint32_t sum = bit_cast<std::uint32_t>(bit_cast<float>(a) + bit_cast<float>(anchor));
  return finish_code<F>(bits, (p >> L::kDiscarded) - L::kCode + (sum - anchor));
}

// Encodes an x that is not NaN to nearest, in the fewest steps. Only the low bits of the code are
// used, so the anchor is not subtracted: its low bits are chosen to make up for Lowest's code (an
// even number, so that ties stay).
template <class F>
MINIFLOAT_INLINE std::uint32_t encode_nearest_number(float x) {
  using L = Lowest<F>;
  constexpr std::uint32_t kCodes = 2 * F::kSignBit;
  constexpr std::uint32_t kAnchor =
      (static_cast<std::uint32_t>(L::kDiscarded) << Float32::kMantissaBits) +
      (0u - L::kCode) % kCodes;
  static_assert(kAnchor % 2 == 0);
  const std::uint32_t bits = bit_cast<std::uint32_t>(x);
  const std::uint32_t a = clamp_magnitude<F>(bits);
  const std::uint32_t p = (a > L::kBits ? a : L::kBits) & Float32::kExponent;
  const std::uint32_t sum =
      bit_cast<std::uint32_t>(bit_cast<float>(a) + bit_cast<float>(p + kAnchor));
  const std::uint32_t sign = (bits >> (32 - F::kBits)) & F::kSignBit;
  return ((sum + (p >> L::kDiscarded)) | sign) % kCodes;
}

// Rounds a magnitude to the nearest value of the format: decode(encode_nearest(x)) in the steps of
// encode_nearest, whose sum less its anchor is the value. NaN gives F::kMax.
template <class F>
MINIFLOAT_INLINE float round_magnitude(float x) {
  using L = Lowest<F>;
  const std::uint32_t a = clamp_magnitude<F>(bit_cast<std::uint32_t>(x));
  const std::uint32_t p = (a > L::kBits ? a : L::kBits) & Float32::kExponent;
  const float anchor =
      bit_cast<float>(p + (static_cast<std::uint32_t>(L::kDiscarded) << Float32::kMantissaBits));
  return (bit_cast<float>(a) + anchor) - anchor;
}

// Encodes stochastically. Normal in the format: the random bits are added at the top of the
// discarded ones, and a carry goes into the exponent. Below: the value in fixed point, 16 bits
// after the quantum.
template <class F>
MINIFLOAT_INLINE std::uint32_t encode_stochastic(float x, std::uint32_t random) {
  using L = Lowest<F>;
  const std::uint32_t bits = bit_cast<std::uint32_t>(x);
  const std::uint32_t a = clamp_magnitude<F>(bits);
  constexpr std::uint32_t kBelowLowest = L::kCode - (1u << F::kMantissaBits);
  const std::uint32_t normal =
      ((a + (random >> (32 - L::kDiscarded))) >> L::kDiscarded) - kBelowLowest;
  constexpr float kFixed = bit_cast<float>(
      static_cast<std::uint32_t>(16 + F::kMantissaBits - F::kMinExponent + Float32::kBias)
      << Float32::kMantissaBits);
  const std::uint32_t small = a < L::kBits ? a : 0u;  // keeps the conversion in range
  const auto fixed =
      static_cast<std::uint32_t>(static_cast<std::int32_t>(bit_cast<float>(small) * kFixed));
  const std::uint32_t subnormal = (fixed + (random >> 16)) >> 16;
  return finish_code<F>(bits, a < L::kBits ? subnormal : normal);
}

}  // namespace minifloat::cpu
