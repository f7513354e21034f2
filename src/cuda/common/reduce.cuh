// The largest bit pattern of a warp and of a block, and prefixes over the lanes of a warp.
#pragma once

#include <cstdint>

#include "cuda/common/tile.cuh"

namespace minifloat::cuda {

__device__ __forceinline__ std::uint32_t warp_max(std::uint32_t m) {
  return __reduce_max_sync(kAllLanes, m);
}
// Returns the largest value of the lanes up to this one.
__device__ __forceinline__ std::int32_t warp_prefix_max(std::int32_t value) {
#pragma unroll
  for (unsigned step = 1; step < 32; step *= 2) {
    const std::int32_t before = __shfl_up_sync(kAllLanes, value, step);
    if (threadIdx.x % 32 >= step) value = max(value, before);
  }
  return value;
}
// Returns the sum of the lanes up to this one.
__device__ __forceinline__ std::int32_t warp_prefix_sum(std::int32_t value) {
#pragma unroll
  for (unsigned step = 1; step < 32; step *= 2) {
    const std::int32_t before = __shfl_up_sync(kAllLanes, value, step);
    if (threadIdx.x % 32 >= step) value += before;
  }
  return value;
}
// Raises an amax's bits in memory. They are ordered as signed integers, as larger_amax orders them.
__device__ __forceinline__ void raise_bits(std::uint32_t* out, std::uint32_t m) {
  atomicMax(reinterpret_cast<std::int32_t*>(out), static_cast<std::int32_t>(m));
}
// Raises `out`, and `also` unless that is null, by the block's largest bit pattern.
__device__ __forceinline__ void raise_by_block(std::uint32_t* out, std::uint32_t m,
                                               std::uint32_t* also = nullptr) {
  __shared__ std::uint32_t of_warp[kThreads / 32];
  m = warp_max(m);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = m;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  m = warp_max(of_warp[threadIdx.x % (kThreads / 32)]);
  if (threadIdx.x != 0) return;
  raise_bits(out, m);
  if (also) raise_bits(also, m);
}

}  // namespace minifloat::cuda
