// 16 values times a factor -> 16 codes, in the fewest steps of this hardware. The codes are those
// of core/rounding.h's encode: tests/gpu compares the bytes, and tests/gpu/test_exhaustive.py
// visits every float.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/tile.cuh"
#include "minifloat/core/philox.h"

namespace minifloat::cuda {

// The codes of a vec16: 16 bytes, or 16 nibbles.
template <class F>
struct Codes {
  std::uint32_t w[F::kBits == 8 ? 4 : 2];
  __device__ __forceinline__ std::uint32_t operator[](int i) const {
    return F::kBits == 8 ? (w[i / 4] >> (i % 4 * 8)) & 0xFFu : (w[i / 8] >> (i % 8 * 4)) & 0xFu;
  }
  // Drops the first code, for a loop over codes that is not unrolled.
  __device__ __forceinline__ void pop() {
    constexpr int kWords = F::kBits == 8 ? 4 : 2;
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      w[i] = __funnelshift_r(w[i], i + 1 < kWords ? w[i + 1] : 0u, F::kBits);
  }
};

// Chooses between the instructions of the two FP8 formats; for another format, an error.
template <class F>
  requires(std::is_same_v<F, E4M3> || std::is_same_v<F, E5M2>)
inline constexpr bool kIsE4m3 = std::is_same_v<F, E4M3>;

// ---- Nearest even -------------------------------------------------------------------------------
template <class F>
__device__ __forceinline__ std::uint32_t encode_pair(float low, float high) {
  if constexpr (kIsE4m3<F>)
    return cvt_e4m3x2(low, high);
  else
    return cvt_e5m2x2(low, high);
}

// Rounds to E2M1's grid without an instruction for it. v is 2^-6 times the magnitude, so that
// E4M3's subnormals are E2M1's grid, shifted:
//
//     b    a little below v, in its binade or at the end of the one before; at least 2^-6
//     q    (v + 2^22 b) - 2^22 b: between 2^22 and 2^23 times v's power of two m, the adder rounds
//          to multiples of m / 2, which is E2M1's grid, ties to even; 2^22 b is a whole number of
//          them. Where b is below m, the adder rounds to m / 4, and the code's last bits, which are
//          dropped, hold the difference
//     E4M3's code of q   0 eeee mmm = 0 0 ccc x x of E2M1's code ccc: shifted by two places
//
// For 0 <= v < 7 * 2^-6.
__device__ __forceinline__ float round_to_e2m1_grid(float v) {
  constexpr float kMagic = 0x1p22f, kLowest = 0x1p-6f, kBelow = 1.0f - 0x1p-12f;
  const float b = fmaxf(v * kBelow, kLowest);
  return fmaf(b, -kMagic, fmaf(b, kMagic, v));
}
// Return the signs of 8 elements from `first` on, each at its nibble's upper bit; other bits are
// undefined.
__device__ __forceinline__ std::uint32_t sign_nibbles(const Vec16<float>& vec, int first) {
  std::uint32_t sign = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    sign |= (bit_cast<std::uint32_t>(vec.v[first + i]) >> (28 - 4 * i)) & (0x8u << (4 * i));
  return sign;
}
__device__ __forceinline__ std::uint32_t sign_nibbles(const Vec16<Bf16>& vec, int first) {
  const std::uint32_t* w = vec.w + first / 2;
  const std::uint32_t low = __byte_perm(w[0], w[1], 0x7531), high = __byte_perm(w[2], w[3], 0x7531);
  const std::uint32_t even = __byte_perm(low, high, 0x6420), odd = __byte_perm(low, high, 0x7531);
  return select_bits(0x0F0F'0F0Fu, even >> 4, odd);
}
// Packs eight codes, each in bits 24:22 with its sign in 31 and an overflow in 25, into nibbles.
__device__ __forceinline__ std::uint32_t pack_e2m1x8(const std::uint32_t* t) {
  constexpr std::uint32_t kEven = 0x000F'000Fu, kOdd = 0x0F00'0F00u, kLow = 0x00FF'00FFu;
  const std::uint32_t p0 = __byte_perm(t[0], t[4], 0x7632), p1 = __byte_perm(t[1], t[5], 0x7632);
  const std::uint32_t p2 = __byte_perm(t[2], t[6], 0x7632), p3 = __byte_perm(t[3], t[7], 0x7632);
  const std::uint32_t codes =
      select_bits(kLow, select_bits(kEven, p0 >> 6, p1 >> 2), select_bits(kOdd, p2 << 2, p3 << 6));
  const std::uint32_t signs =
      select_bits(kLow, select_bits(kEven, p0 >> 12, p1 >> 8), select_bits(kOdd, p2 >> 4, p3));
  const std::uint32_t too_large = codes & 0x8888'8888u;
  return select_bits(0x7777'7777u, codes | (too_large - (too_large >> 3)), signs);
}
// Encodes eight magnitudes of E2M1's grid, 2^-6 times each; bits right of a code's are dropped.
__device__ __forceinline__ std::uint32_t encode_grid_e2m1x8(const float* q, std::uint32_t signs) {
#if defined(MINIFLOAT_HAS_FP8_CONVERSIONS)
  const std::uint32_t even = cvt_e4m3x2(q[0], q[2]) | cvt_e4m3x2(q[4], q[6]) << 16;
  const std::uint32_t odd = cvt_e4m3x2(q[1], q[3]) | cvt_e4m3x2(q[5], q[7]) << 16;
  const std::uint32_t magnitude = select_bits(0x0F0F'0F0Fu, even >> 2, odd << 2);
  return select_bits(0x7777'7777u, magnitude, signs);
#else  // 2^-126 of the value has the code in bits 24:22
  std::uint32_t t[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) t[i] = bit_cast<std::uint32_t>(multiply_toward_zero(q[i], 0x1p-120f));
  return select_bits(0x7777'7777u, pack_e2m1x8(t), signs);
#endif
}
__device__ __forceinline__ std::uint32_t encode_e2m1x8(const float* v, std::uint32_t signs) {
#if defined(MINIFLOAT_HAS_FP4_CONVERSIONS)
  (void)signs;
  return cvt_e2m1x8(v);
#else
  float q[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) q[i] = round_to_e2m1_grid(v[i]);
  return encode_grid_e2m1x8(q, signs);
#endif
}

// Encodes to nearest even. takes_fast_path: as in Encoding.
template <class T>
__device__ __forceinline__ Codes<E2M1> encode_e2m1(const Vec16<T>& vec, float factor,
                                                   bool takes_fast_path) {
  Codes<E2M1> out;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int first = 8 * half;
    float v[8];
#if defined(MINIFLOAT_HAS_FP4_CONVERSIONS)
    (void)takes_fast_path;  // the instruction saturates
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = vec[first + i] * factor;
#else
    constexpr float kShift = 0x1p-6f;
    if (takes_fast_path) {  // the shifted factor is exact, and no product that matters is subnormal
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = fabsf(vec[first + i]) * (factor * kShift);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        v[i] = fminf(fabsf(vec[first + i]) * factor * kShift, E2M1::kMax * kShift);
    }
#endif
    out.w[half] = encode_e2m1x8(v, sign_nibbles(vec, first));
  }
  return out;
}

// ---- Stochastic ---------------------------------------------------------------------------------
// Rounds to E2M1 stochastically, for |v| < 8. |v| * 2^-126 towards zero puts the code of the value
// below in bits 24:22 of the (sub)normal float, and the fraction to its right. 16 random bits are
// added just below. A carry rounds up: above 6, to bit 25.
//   random: the 16 bits, in 15:0
__device__ __forceinline__ std::uint32_t round_e2m1_stochastic(float v, std::uint32_t random) {
  return random * 64u + bit_cast<std::uint32_t>(multiply_toward_zero(v, 0x1p-126f));
}
// Returns the random bits of four elements of a 4-bit format, each in 15:0.
__device__ __forceinline__ void random_bits_of_word(std::uint32_t w, std::uint32_t (&random)[4]) {
  const std::uint32_t r = __brev(w);
  random[0] = __byte_perm(w, 0, 0x4420), random[1] = __byte_perm(r, 0, 0x4431);
  random[2] = __byte_perm(w, 0, 0x4431), random[3] = __byte_perm(r, 0, 0x4420);
}
template <class T>
__device__ __forceinline__ Codes<E2M1> encode_e2m1_stochastic(const Vec16<T>& vec, float factor,
                                                              bool takes_fast_path,
                                                              const RandomBits& bits) {
  Codes<E2M1> out;
#if defined(MINIFLOAT_HAS_STOCHASTIC_CONVERSIONS)
  (void)takes_fast_path;
  std::uint32_t quads[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float v[4] = {vec[4 * i] * factor, vec[4 * i + 1] * factor, vec[4 * i + 2] * factor,
                        vec[4 * i + 3] * factor};
    quads[i] = cvt_rs_e2m1x4(v, bits.w[i]);
  }
  out.w[0] = quads[0] | quads[1] << 16;
  out.w[1] = quads[2] | quads[3] << 16;
#else
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = vec[8 * half + i] * factor;
    if (!takes_fast_path) {
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = clamp_magnitude(v[i], E2M1::kMax);
    }
    std::uint32_t t[8];
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      std::uint32_t random[4];
      random_bits_of_word(bits.w[2 * half + q], random);
#pragma unroll
      for (int i = 0; i < 4; ++i) t[4 * q + i] = round_e2m1_stochastic(v[4 * q + i], random[i]);
    }
    out.w[half] = pack_e2m1x8(t);
  }
#endif
  return out;
}

// ---- E1M2 ---------------------------------------------------------------------------------------
// A uniform grid: the code is the magnitude in quarters, a whole number that the adder rounds to.
//
//     nearest      4 v + 2^23, whose last place is 1, ties to even: the code in byte 0
//     stochastic   4 v + 2^7 towards zero, whose last place is 2^-16: the code in bits 18:16 above
//                  the fraction's first 16 digits, which the 16 random bits are added to. Byte 2
//
// v is at most 1.75, which has no fraction, so that no code is past 7.
inline constexpr float kE1m2PerUnit = 1 << E1M2::kMantissaBits;
static_assert(E1M2::kMinExponent == 0 && E1M2::kMax * kE1m2PerUnit == E1M2::kMaxBits);

__device__ __forceinline__ float e1m2_magnitude(float x, float factor) {
  return fminf(fabsf(x) * factor, E1M2::kMax);
}
// Packs eight codes, each alone in byte kByte of a word, into nibbles.
template <std::uint32_t kByte>
__device__ __forceinline__ std::uint32_t pack_e1m2x8(const std::uint32_t (&t)[8]) {
  constexpr std::uint32_t kBoth = kByte | (4 + kByte) << 4;
  const std::uint32_t even =
      __byte_perm(__byte_perm(t[0], t[2], kBoth), __byte_perm(t[4], t[6], kBoth), 0x5410);
  const std::uint32_t odd =
      __byte_perm(__byte_perm(t[1], t[3], kBoth), __byte_perm(t[5], t[7], kBoth), 0x5410);
  return even | odd << 4;
}
template <class T>
__device__ __forceinline__ Codes<E1M2> encode_e1m2(const Vec16<T>& vec, float factor) {
  Codes<E1M2> out;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    std::uint32_t t[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      t[i] = bit_cast<std::uint32_t>(
          fmaf(e1m2_magnitude(vec[8 * half + i], factor), kE1m2PerUnit, 0x1p23f));
    out.w[half] = select_bits(0x7777'7777u, pack_e1m2x8<0>(t), sign_nibbles(vec, 8 * half));
  }
  return out;
}
template <class T>
__device__ __forceinline__ Codes<E1M2> encode_e1m2_stochastic(const Vec16<T>& vec, float factor,
                                                              const RandomBits& bits) {
  Codes<E1M2> out;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    std::uint32_t t[8];
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      std::uint32_t random[4];
      random_bits_of_word(bits.w[2 * half + q], random);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        t[4 * q + i] = random[i] + bit_cast<std::uint32_t>(fma_toward_zero(
                                       e1m2_magnitude(vec[8 * half + 4 * q + i], factor),
                                       kE1m2PerUnit, 0x1p7f));
    }
    out.w[half] = select_bits(0x7777'7777u, pack_e1m2x8<2>(t), sign_nibbles(vec, 8 * half));
  }
  return out;
}

// ---- FP8, stochastic ----------------------------------------------------------------------------
// Rounds a number to an 8-bit format stochastically. A product towards zero again puts the code of
// the value below on top of the fraction, whose upper bits the 16 random bits are added to. The
// largest value has no fraction.
//   random: the 16 bits, in 15:0
//   returns sign and code in 31:24
template <class F>
__device__ __forceinline__ std::uint32_t round_fp8_stochastic(float v, std::uint32_t random) {
  constexpr int kFraction = Float32::kMantissaBits - F::kMantissaBits;
  constexpr float kToSubnormal = bit_cast<float>(  // 2^(-126 - F::kMinExponent)
      static_cast<std::uint32_t>(1 - F::kMinExponent) << Float32::kMantissaBits);
  const float clamped = fminf(fabsf(v), F::kMax);
  const std::uint32_t below = bit_cast<std::uint32_t>(multiply_toward_zero(clamped, kToSubnormal));
  const std::uint32_t code = (below + (random << (kFraction - 16))) << (24 - kFraction);
  return select_bits(0x7F00'0000u, code, bit_cast<std::uint32_t>(v));
}
// The same of any values.
template <class F, class T>
__device__ __forceinline__ Codes<F> encode_any_fp8_stochastic(const Vec16<T>& vec, float factor,
                                                              const RandomBits& bits) {
  float v[kVec];  // indexed by a loop that is not unrolled
#pragma unroll
  for (int i = 0; i < kVec; ++i) v[i] = vec[i] * factor;
  Codes<F> out = {};
#pragma unroll
  for (int q = 0; q < 4; ++q)
#pragma unroll 1
    for (int i = 0; i < 4; ++i)
      out.w[q] |= encode<F, Stochastic>(v[4 * q + i], {random_bits<F::kBits>(bits.w[q], i)})
                  << (i * 8);
  return out;
}

template <class F, class T>
__device__ __forceinline__ Codes<F> encode_fp8_stochastic(const Vec16<T>& vec, float factor,
                                                          const RandomBits& bits) {
  Codes<F> out = {};
#if defined(MINIFLOAT_HAS_STOCHASTIC_CONVERSIONS)
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float v[4] = {vec[4 * i] * factor, vec[4 * i + 1] * factor, vec[4 * i + 2] * factor,
                        vec[4 * i + 3] * factor};
    if constexpr (kIsE4m3<F>)
      out.w[i] = canonicalize_nan<F>(cvt_rs_e4m3x4(v, bits.w[i]));
    else
      out.w[i] = canonicalize_nan<F>(cvt_rs_e5m2x4(v, bits.w[i]));
  }
#else
  if (vec.amax() >= Float32::kExponent || magnitude_bits(factor) >= Float32::kExponent)
    return encode_any_fp8_stochastic<F>(vec, factor, bits);
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const std::uint32_t w = bits.w[q], r = __brev(w);
    const std::uint32_t random[4] = {w & 0xFFFFu, r >> 16, w >> 16, r & 0xFFFFu};
    std::uint32_t t[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) t[i] = round_fp8_stochastic<F>(vec[4 * q + i] * factor, random[i]);
    out.w[q] = __byte_perm(__byte_perm(t[0], t[1], 0x73), __byte_perm(t[2], t[3], 0x73), 0x5410);
  }
#endif
  return out;
}

template <class F, class T>
__device__ __forceinline__ Codes<F> encode_stochastic(const Vec16<T>& vec, float factor,
                                                      bool takes_fast_path,
                                                      const RandomBits& bits) {
  if constexpr (std::is_same_v<F, E1M2>) {
    return encode_e1m2_stochastic(vec, factor, bits);
  } else if constexpr (F::kBits == 4) {
    return encode_e2m1_stochastic(vec, factor, takes_fast_path, bits);
  } else {
    return encode_fp8_stochastic<F>(vec, factor, bits);
  }
}

// ---- Any ----------------------------------------------------------------------------------------
// The factor of a vec16's elements, and their special cases.
struct Encoding {
  float factor;
  bool zero;             // NVFP4: a block of scale 0 has zero codes, without signs
  bool infinity_is_nan;  // +delayed
  // The fast-path condition. E2M1: no product reaches 7, and the factor is a number of at least
  // 2^-110. E1M2: the factor is a number, and the block's scale not 0. Where the condition is not
  // shown, the same codes are computed in more steps.
  bool takes_fast_path;
};

template <class F, bool kStochastic, class T>
__device__ __forceinline__ Codes<F> encode_vec(const Vec16<T>& vec, const Encoding& how,
                                               const RandomBits& bits) {
  Codes<F> out;
  if constexpr (kStochastic)
    out = encode_stochastic<F>(vec, how.factor, how.takes_fast_path, bits);
  else if constexpr (std::is_same_v<F, E1M2>)
    out = encode_e1m2(vec, how.factor);
  else if constexpr (F::kBits == 4)
    out = encode_e2m1(vec, how.factor, how.takes_fast_path);
  else
#pragma unroll
    for (int i = 0; i < 4; ++i)
      out.w[i] = encode_pair<F>(vec[4 * i] * how.factor, vec[4 * i + 1] * how.factor) |
                 encode_pair<F>(vec[4 * i + 2] * how.factor, vec[4 * i + 3] * how.factor) << 16;
  if constexpr (F::kBits == 8)
    if (how.infinity_is_nan && vec.amax() >= Float32::kExponent) {
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        if (magnitude_bits(vec[i]) == Float32::kExponent)
          out.w[i / 4] = (out.w[i / 4] & ~(0xFFu << (i % 4 * 8))) | F::kNanBits << (i % 4 * 8);
    }
  if constexpr (F::kBits == 4)  // a NaN among 8 bits encodes itself
    if (!how.takes_fast_path) {
      const bool nan = magnitude_bits(how.factor) > Float32::kExponent;
#pragma unroll
      for (std::uint32_t& w : out.w) {
        if (nan) w = F::kNanBits * 0x1111'1111u;
        if (how.zero) w = 0;
      }
    }
  return out;
}

}  // namespace minifloat::cuda
