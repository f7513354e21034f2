// MS-EDEN (arXiv 2601.22813): NVFP4 whose codes are rounded to nearest and whose mean is that of
// the values. The randomness is in the transform, whose 128 signs each step draws anew, and in the
// rounding of block scales:
//
//     y       transform of x                      signs by eden_signs, the same for both operands
//                                                 of a product
//     s       block amax -> E4M3, nearest         core/scaling.h, Nvfp4Rounding::kEden
//     code    of y under s, nearest               elements past 6 saturate
//     c       <y, y> / <y, values of the codes>   one for 128 columns: 8 blocks of one row
//     scale   E4M3 of s * c, stochastic           the stored one
//
// So the codes' values have the projection on y that y has. They are in units of the tensor's
// scale: a block's is code * s, and its sums below are multiplied by s * s. In the sums an element
// and its code are in 64ths, as CUDA's rounding to E2M1 has them.
#pragma once

#include <cstdint>

#include "minifloat/core/hadamard.h"
#include "minifloat/core/host_device.h"
#include "minifloat/core/philox.h"
#include "minifloat/core/rounding.h"
#include "minifloat/core/scaling.h"

namespace minifloat {

inline constexpr int kEdenPoints = 128;  // of the transform: the columns of one correction
inline constexpr int kEdenBlocks = 8;    // of these columns
inline constexpr float kEdenUnit = 0x1p-6f;

// ---- Random bits --------------------------------------------------------------------------------
// Returns the signs of the transform. Two streams that differ in the lowest bit, as those of the
// operands of a product do, have the same. The counter is past each one of eden_bits_at.
MINIFLOAT_HD constexpr HadamardSigns eden_signs(const RandomKey& random) {
  const RandomBits bits = random_bits_at(random.key, random.stream & ~std::uint64_t{1}, ~0u, ~0u);
  return {{bits.w[0], bits.w[1], bits.w[2], bits.w[3]}};
}

// Returns the bits of the 8 scales of columns [128 * group, 128 * group + 128) of row `row`.
MINIFLOAT_HD constexpr RandomBits eden_bits_at(const RandomKey& random, std::uint32_t row,
                                               std::uint32_t group) {
  return random_bits_at(random.key, random.stream, row, group);
}
// Returns the 16 bits of one of these scales, in the upper half: the lower half of word block / 2
// for an even block, the upper half for an odd one.
MINIFLOAT_HD constexpr Stochastic eden_bits(const RandomBits& bits, int block) {
  const std::uint32_t word = bits.w[block / 2];
  return {block % 2 ? word & 0xFFFF'0000u : word << 16};
}

// ---- The correction -----------------------------------------------------------------------------
// Sums over a block, or over the blocks of one correction.
struct EdenSums {
  float squares = 0.0f;   // of elements
  float products = 0.0f;  // of elements and their codes' values
};

// Adds an element of a block, in the order of columns.   scaled: |y| * (the factor of elements *
// kEdenUnit); value: the code's magnitude * kEdenUnit
MINIFLOAT_HD void add_element(EdenSums& sums, float scaled, float value) {
  sums.squares = multiply_add(scaled, scaled, sums.squares);
  sums.products = multiply_add(scaled, value, sums.products);
}
// Returns a block's part of the sums of its correction.   scale: s; a block whose s is 0 has none
MINIFLOAT_HD constexpr EdenSums weighted(const EdenSums& block, float scale) {
  if (scale == 0.0f) return {};
  const float weight = scale * scale;  // exact
  return {weight * block.squares, weight * block.products};
}
MINIFLOAT_HD constexpr EdenSums add(const EdenSums& a, const EdenSums& b) {
  return {a.squares + b.squares, a.products + b.products};
}
// Returns the correction, from the sums of its blocks: i and i + 4 are added, then i and i + 2, i
// and i + 1. It is 1 where the quotient is not finite.
MINIFLOAT_HD constexpr float eden_correction(const EdenSums& sums) {
  const float c = sums.squares / sums.products;
  return is_finite(magnitude_bits(c)) ? c : 1.0f;
}

// Returns the code of the stored scale.   scale: s, or NaN
MINIFLOAT_HD constexpr std::uint32_t eden_scale(float scale, float correction, Stochastic bits) {
  return encode<E4M3>(scale * correction, bits);
}

}  // namespace minifloat
