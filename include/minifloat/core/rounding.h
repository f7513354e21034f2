// float -> low-precision bits, and back. The only definition of rounding in the library.
#pragma once

#include <cstdint>

#include "minifloat/core/format.h"
#include "minifloat/core/host_device.h"

namespace minifloat {

// A rounding rule: the number that is added below the cut before the low bits are dropped.
//
//     m = F F ... F L | R T T ... T        the cut keeps L and discards `shift` bits
//
struct NearestEven {  // carries iff  R T..T > half,  or  R T..T = half and L = 1
  MINIFLOAT_HD constexpr std::uint32_t below_cut(std::uint32_t m, int shift) const {
    return (1u << (shift - 1)) - 1u + ((m >> shift) & 1u);
  }
};
struct AwayFromZero {  // carries iff anything at all is discarded
  MINIFLOAT_HD constexpr std::uint32_t below_cut(std::uint32_t, int shift) const {
    return (1u << shift) - 1u;
  }
};
// Carries with probability floor(R T..T / 2^shift * 2^16) / 2^16. `bits` holds the element's 16
// random bits in its upper half (core/philox.h). Its lower half is zero, so that a sticky bit alone
// never carries.
struct Stochastic {
  std::uint32_t bits;
  MINIFLOAT_HD constexpr std::uint32_t below_cut(std::uint32_t, int shift) const {
    return bits >> (32 - shift);
  }
};

// Returns the code of x in format F (E4M3, E5M2, E2M1, E1M2), rounded by the rule. Values past
// +-F::kMax saturate, infinities too. NaN gives F::kNanBits, whatever its sign.
template <class F, class Rounding = NearestEven>
MINIFLOAT_HD constexpr std::uint32_t encode(float x, Rounding rounding = {}) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(x);
  const std::uint32_t magnitude = bits & Float32::kMagnitude;

  // 1. A value at or past the largest finite one becomes that one, which rounds to itself.
  constexpr std::uint32_t kMax = bit_cast<std::uint32_t>(F::kMax);
  const std::uint32_t clamped = magnitude < kMax ? magnitude : kMax;

  // 2. The binade to round in: that of the value, or the format's lowest if the code is subnormal.
  const int biased = static_cast<int>(clamped >> Float32::kMantissaBits);
  const int unclamped = (biased > 0 ? biased : 1) - Float32::kBias;
  const int exponent = unclamped > F::kMinExponent ? unclamped : F::kMinExponent;

  // 3. Cut the significand at one quantum, 2^(exponent - kMantissaBits). More than 31 discarded
  //    places hold no bit that decides: they are dropped first, into one sticky bit.
  const std::uint32_t full =
      (clamped & Float32::kMantissa) | (biased > 0 ? Float32::kImplicitBit : 0u);
  const int places = Float32::kMantissaBits - F::kMantissaBits + (exponent - unclamped);
  const int shift = places < 31 ? places : 31;
  const int excess = places - shift < 31 ? places - shift : 31;
  const std::uint32_t leading = full >> excess;
  const std::uint32_t m = leading | ((leading << excess) != full ? 1u : 0u);
  const std::uint32_t quanta = (m + rounding.below_cut(m, shift)) >> shift;

  // 4. Pack by addition: the implicit bit supplies exponent code 1, and a carry moves up a binade.
  const std::uint32_t binade = static_cast<std::uint32_t>(exponent - F::kMinExponent);
  const std::uint32_t sign = (bits >> 31) * F::kSignBit;
  const std::uint32_t code = sign | ((binade << F::kMantissaBits) + quanta);

  // 5. NaN has its own code.
  return magnitude > Float32::kExponent ? F::kNanBits : code;
}

// Replaces each NaN of a word's four 8-bit codes by F::kNanBits. No code may be an infinity.
template <class F>
MINIFLOAT_HD constexpr std::uint32_t canonicalize_nan(std::uint32_t codes) {
  constexpr std::uint32_t kEach = 0x0101'0101u, kMagnitude = F::kSignBit - 1;
  const std::uint32_t magnitudes = codes & kMagnitude * kEach;
  // A code past kMaxBits sets its byte's upper bit; the sum never reaches the next byte.
  const std::uint32_t past_max = magnitudes + (kMagnitude - F::kMaxBits) * kEach;
  const std::uint32_t nan = (past_max >> 7 & kEach) * 0xFFu;
  return (codes & ~nan) | (F::kNanBits * kEach & nan);
}

// Returns x as bf16 bits. bf16 has float's exponent, so one cut at a fixed place is enough.
// Overflow gives infinity, as in IEEE 754; NaN gives the quiet NaN.
MINIFLOAT_HD constexpr std::uint32_t encode_bf16(float x) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(x);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return (bits & Float32::kMagnitude) > Float32::kExponent ? BF16::kNanBits : rounded;
}
MINIFLOAT_HD constexpr float decode_bf16(std::uint32_t code) { return bit_cast<float>(code << 16); }
MINIFLOAT_HD constexpr float round_to_bf16(float x) { return decode_bf16(encode_bf16(x)); }

// Returns the value of a code of E4M3, E5M2, E2M1 or E1M2. Upper bits of `code` are ignored.
template <class F>
MINIFLOAT_HD constexpr float decode(std::uint32_t code) {
  const std::uint32_t magnitude = code & (F::kSignBit - 1);
  const std::uint32_t e = magnitude >> F::kMantissaBits;
  const std::uint32_t m = magnitude & ((1u << F::kMantissaBits) - 1);
  const std::uint32_t sign = code & F::kSignBit ? 0x8000'0000u : 0u;

  const int exponent = (e ? static_cast<int>(e) : 1) - F::kBias - F::kMantissaBits;
  const float quantum = bit_cast<float>(static_cast<std::uint32_t>(exponent + Float32::kBias)
                                        << Float32::kMantissaBits);
  const float value = static_cast<float>(e ? m + (1u << F::kMantissaBits) : m) * quantum;
  std::uint32_t bits = bit_cast<std::uint32_t>(value);
  if constexpr (F::kNanBits > F::kMaxBits)
    if (magnitude > F::kMaxBits) bits = Float32::kNanBits;
  if constexpr (requires { F::kInfBits; })
    if (magnitude == F::kInfBits) bits = Float32::kExponent;
  return bit_cast<float>(bits | sign);
}

static_assert(encode<E2M1>(2.5f) == 0x4 && encode<E2M1>(3.5f) == 0x6);  // ties: the even code
static_assert(encode<E1M2>(0.625f) == 0x2 && encode<E1M2>(-9.0f) == 0xF);
static_assert(encode<E4M3>(1e9f) == 0x7E && encode<E4M3>(-0.0f) == 0x80);
static_assert(encode<E4M3, AwayFromZero>(1e-30f) == 0x01 && encode<E4M3, AwayFromZero>(0) == 0);
static_assert(decode<E5M2>(0x7B) == E5M2::kMax && decode<E4M3>(0x01) == 0x1p-9f);
static_assert(decode<E1M2>(0x3) == 0.75f && decode<E1M2>(0xD) == -1.25f);

}  // namespace minifloat
