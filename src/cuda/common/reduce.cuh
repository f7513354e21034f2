// The largest bit pattern of a warp and of a block.
#pragma once

#include <cstdint>

#include "cuda/common/tile.cuh"

namespace minifloat::cuda {

__device__ __forceinline__ std::uint32_t warp_max(std::uint32_t m) {
  return __reduce_max_sync(kAllLanes, m);
}
// Raises `out` by the block's largest bit pattern.
__device__ __forceinline__ void raise_by_block(std::uint32_t* out, std::uint32_t m) {
  __shared__ std::uint32_t of_warp[kThreads / 32];
  m = warp_max(m);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = m;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  m = warp_max(of_warp[threadIdx.x % (kThreads / 32)]);
  if (threadIdx.x == 0) atomicMax(out, m);
}

}  // namespace minifloat::cuda
