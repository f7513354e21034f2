// The cast of a vec16 under +eden (core/eden.h): its codes, its part of a correction's sums, and
// its stored scale.
//
//     any         core/eden.h's add_element, element by element
//     fast path   sums and codes of the same rounded values
#pragma once

#include <cstdint>

#include "cuda/codec/encode.cuh"
#include "cuda/codec/scale.cuh"
#include "cuda/common/signs.cuh"

namespace minifloat::cuda {

struct EdenCodes {
  Codes<E2M1> codes;
  EdenSums sums;
};
template <class T>
__device__ __forceinline__ EdenCodes eden_codes_of_any(const BlockScale& block,
                                                       const Vec16<T>& vec) {
  float v[kVec];  // indexed by a loop that is not unrolled
#pragma unroll
  for (int i = 0; i < kVec; ++i) v[i] = fabsf(vec[i]);
  EdenSums sums;
#pragma unroll 1
  for (int i = 0; i < kVec; ++i)
    add_element(sums, v[i] * (block.encode * kEdenUnit),
                decode<E2M1>(encode<E2M1>(v[i] * block.encode)) * kEdenUnit);
  return {encode_vec<E2M1, false>(vec, {block.encode, false, false, false}, {}), sums};
}
// Under the fast-path condition no element reaches 7, and the shifted factor is exact. Elements are
// bf16, so that round_to_e2m1_grid's 2^22 b can be the product with a factor of 12 bits, a little
// smaller. It is exact and ends in zeros: the sum with v rounds to the grid's own steps, and the
// result has no bits right of a code's.
template <class T>
__device__ __forceinline__ EdenCodes eden_codes_by_fast_path(const BlockScale& block,
                                                             const Vec16<T>& vec) {
  static_assert(kEdenUnit == 0x1p-6f);  // round_to_e2m1_grid's
  constexpr float kLowest = 0x1p22f * kEdenUnit;
  constexpr std::uint32_t kOf12Bits = ~0u << (Float32::kMantissaBits - 11);
  const float factor = block.encode * kEdenUnit;
  const float below = bit_cast<float>(bit_cast<std::uint32_t>(factor * 0x1p22f) & kOf12Bits);
  EdenCodes out = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float grid[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float x = fabsf(vec[8 * half + i]), v = x * factor, magic = fmaxf(x * below, kLowest);
      grid[i] = (v + magic) - magic;
      add_element(out.sums, v, grid[i]);
    }
    out.codes.w[half] = encode_grid_e2m1x8(grid, sign_nibbles(vec, 8 * half));
  }
  return out;
}

// Returns eden_scale's code. A corrected scale that is normal, and below the largest, is rounded by
// an addition at the top of the bits that E4M3 does not have.
__device__ __forceinline__ std::uint32_t stored_scale(float scale, float correction,
                                                      Stochastic bits) {
  constexpr std::uint32_t kLeast = bit_cast<std::uint32_t>(0x1p-6f),
                          kMost = bit_cast<std::uint32_t>(E4M3::kMax);
  constexpr int kDropped = Float32::kMantissaBits - E4M3::kMantissaBits;
  constexpr std::uint32_t kBias = static_cast<std::uint32_t>(Float32::kBias - E4M3::kBias)
                                  << E4M3::kMantissaBits;
  const std::uint32_t corrected = bit_cast<std::uint32_t>(scale * correction);
  if (corrected - kLeast < kMost - kLeast)
    return ((corrected + (bits.bits >> (32 - kDropped))) >> kDropped) - kBias;
  return eden_scale(scale, correction, bits);
}

// Returns the codes of a block, and its sums.
template <class T>
__device__ __forceinline__ EdenCodes eden_codes(const BlockScale& block, const Vec16<T>& vec) {
  return block.takes_fast_path ? eden_codes_by_fast_path(block, vec)
                               : eden_codes_of_any(block, vec);
}
__device__ __forceinline__ EdenSums add_of_lane(const EdenSums& sums, int lanes) {
  return add(sums, {__shfl_xor_sync(kAllLanes, sums.squares, lanes),
                    __shfl_xor_sync(kAllLanes, sums.products, lanes)});
}
// Replaces a block's scale by the stored one.
__device__ __forceinline__ void store_corrected(BlockScale& block, float correction,
                                                Stochastic bits, Codes<E2M1>& codes) {
  block.code = stored_scale(block.scale, correction, bits);
  block.scale = decode_e4m3(block.code);
  if (block.code == 0) codes = {};
}

// ---- 8 lanes of a block each --------------------------------------------------------------------
// Returns the codes of a block, and replaces its scale by the stored one. Takes part in an exchange
// of all lanes of the warp.   vec: the lane's block, transformed
template <class T>
__device__ __forceinline__ Codes<E2M1> encode_eden(BlockScale& block, const Vec16<T>& vec,
                                                   Stochastic bits) {
  EdenCodes out = eden_codes(block, vec);
  EdenSums sums = weighted(out.sums, block.scale);
#pragma unroll
  for (int lanes = kEdenBlocks / 2; lanes > 0; lanes /= 2) sums = add_of_lane(sums, lanes);
  store_corrected(block, eden_correction(sums), bits, out.codes);
  return out.codes;
}

// Returns the lane's 16 bits, of the 128 that were drawn for its 8 lanes.
__device__ __forceinline__ Stochastic eden_bits_of_lane(const RandomBits& bits) {
  const unsigned lane = threadIdx.x % kVecColumns;
  const std::uint32_t low = lane & 2 ? bits.w[1] : bits.w[0],
                      high = lane & 2 ? bits.w[3] : bits.w[2], word = lane & 4 ? high : low;
  return {lane & 1 ? word & 0xFFFF'0000u : word << 16};
}

}  // namespace minifloat::cuda
