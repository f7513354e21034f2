// The randomised Hadamard transform of n = 16, 32, 64 or 128 points:
//
//     y = round_to_bf16( fl32(1/sqrt(n)) * H_n (s .* x) )
//
// s: signs, one 16-bit mask repeated every 16 points, or under +eden 128 bits; bit i set = -1. H_n:
// Sylvester's matrix, as butterflies in fp32 with strides 1, 2, 4, ..., n/2 in that order, so that
// every backend rounds alike. The inverse is s .* (H y / sqrt(n)). Two operands transformed alike
// keep their product.
#pragma once

#include <cstdint>

#include "minifloat/core/host_device.h"
#include "minifloat/core/rounding.h"

namespace minifloat {

// Transformer Engine's mask, bits in its order.
inline constexpr std::uint32_t kHadamardSigns = 0xD7E8;

// Returns fl32(1 / sqrt(n)) for n = 16, 32, 64, 128.
MINIFLOAT_HD constexpr float hadamard_norm(int points) {
  const float even = points == 16 || points == 32 ? 0.25f : 0.125f;  // 1/sqrt(16), 1/sqrt(64)
  constexpr float kHalfRoot = 0x1.6A09E6p-1f;                        // fl32(1/sqrt(2))
  return points == 32 || points == 128 ? even * kHalfRoot : even;
}

// The signs of 128 points: bit i % 32 of word i / 32 set = -1.
struct HadamardSigns {
  std::uint32_t w[4];
  // Returns the mask of points [16 * i, 16 * i + 16).
  MINIFLOAT_HD constexpr std::uint32_t of_16(int i) const {
    return (w[i / 2] >> (i % 2 * 16)) & 0xFFFFu;
  }
};
// Returns a mask of 16 points, repeated.
MINIFLOAT_HD constexpr HadamardSigns repeated_signs(std::uint32_t mask) {
  const std::uint32_t both = mask | mask << 16;
  return {{both, both, both, both}};
}

MINIFLOAT_HD constexpr float apply_sign(float x, std::uint32_t signs, int i) {
  return (signs >> (i % 16)) & 1u ? -x : x;
}

// Computes H_n in place. v: (Points), floats or vectors of them
template <int Points, class T>
MINIFLOAT_HD constexpr void butterflies(T* v) {
  MINIFLOAT_UNROLL
  for (int stride = 1; stride < Points; stride *= 2) {
    MINIFLOAT_UNROLL
    for (int i = 0; i < Points; ++i)
      if (!(i & stride)) {
        const T a = v[i], b = v[i + stride];
        v[i] = a + b;
        v[i + stride] = a - b;
      }
  }
}

// Computes H_n (s .* x) in place: the transform before its factor and its rounding. v: (Points)
template <int Points>
MINIFLOAT_HD constexpr void hadamard_sums(float* v, std::uint32_t signs) {
  MINIFLOAT_UNROLL
  for (int i = 0; i < Points; ++i) v[i] = apply_sign(v[i], signs, i);
  butterflies<Points>(v);
}

// Computes the whole transform in place. v: (Points)
template <int Points>
MINIFLOAT_HD constexpr void hadamard(float* v, std::uint32_t signs = kHadamardSigns) {
  hadamard_sums<Points>(v, signs);
  for (int i = 0; i < Points; ++i) v[i] = round_to_bf16(v[i] * hadamard_norm(Points));
}

}  // namespace minifloat
