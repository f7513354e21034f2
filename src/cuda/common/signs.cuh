// The signs of +eden's transform (core/eden.h), which each thread or one of a block computes, as
// the random state is on the device.
//
//     by rows       lanes of 8 hold the 128 points of a transform: each has a mask of 16
//     by tiles      a row of x is one point of every column: SharedTile::flip_rows, or in registers
//
// Other kernels apply constant signs. For +eden they first flip the elements whose two signs
// differ.
#pragma once

#include <cstdint>

#include "cuda/common/tile.cuh"
#include "minifloat/core/eden.h"
#include "minifloat/quantize.h"

namespace minifloat::cuda {

static_assert(kEdenPoints == kTile && kEdenBlocks == kVecColumns);

// Where +eden's signs come from.
struct SignSource {
  const std::int64_t* state;  // null: the signs are the constant ones
  int state_size;
  std::uint64_t stream;

  // Returns where they differ from the constant ones.
  __device__ __forceinline__ HadamardSigns flips() const {
    HadamardSigns signs = eden_signs(random_key(state, state_size, stream));
    const HadamardSigns constant = repeated_signs(kHadamardSigns);
#pragma unroll
    for (int i = 0; i < 4; ++i) signs.w[i] ^= constant.w[i];
    return signs;
  }
};
inline SignSource sign_source(const Spec& spec, const Random& random) {
  if (!spec.is_eden()) return {};
  return {random.state, random.state_size, random.stream};
}

// Returns the mask of the lane's 16 points.
__device__ __forceinline__ std::uint32_t signs_of_lane(const HadamardSigns& signs) {
  const unsigned lane = threadIdx.x % kVecColumns;
  const std::uint32_t low = lane & 2 ? signs.w[1] : signs.w[0],
                      high = lane & 2 ? signs.w[3] : signs.w[2], word = lane & 4 ? high : low;
  return (lane & 1 ? word >> 16 : word) & 0xFFFFu;
}

// A mask of 16 points by pairs: bit i of each half is point 2 i, or 2 i + 1 in the upper half.
__device__ __forceinline__ std::uint32_t by_pairs(std::uint32_t mask) {
  std::uint32_t pairs = 0;
#pragma unroll
  for (int i = 0; i < kVec; ++i) pairs |= (mask >> i & 1u) << (i / 2 + i % 2 * 16);
  return pairs;
}
// Flips the elements of a vec16 whose bits of the mask are set.
__device__ __forceinline__ void flip_by_pairs(Vec16<Bf16>& vec, std::uint32_t pairs) {
#pragma unroll
  for (int i = 0; i < kVec / 2; ++i) vec.w[i] ^= (pairs << (15 - i)) & 0x8000'8000u;
}
__device__ __forceinline__ void flip(Vec16<Bf16>& vec, std::uint32_t mask) {
  flip_by_pairs(vec, by_pairs(mask));
}
__device__ __forceinline__ void flip(Vec16<float>& vec, std::uint32_t mask) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) vec.v[i] = apply_sign(vec.v[i], mask, i);
}

}  // namespace minifloat::cuda
