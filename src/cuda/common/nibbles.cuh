// The transpose of 4-bit codes in registers.
#pragma once

#include <cstdint>

#include "cuda/common/ptx.cuh"

namespace minifloat::cuda {

// Transposes 8 x 8 nibbles in registers: a's word i is row i before, and column i after.
__device__ __forceinline__ void transpose_8x8(std::uint32_t (&a)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // halves
    const std::uint32_t x = a[i], y = a[i + 4];
    a[i] = __byte_perm(x, y, 0x5410), a[i + 4] = __byte_perm(x, y, 0x7632);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)  // bytes
    if (!(i & 2)) {
      const std::uint32_t x = a[i], y = a[i + 2];
      a[i] = __byte_perm(x, y, 0x6240), a[i + 2] = __byte_perm(x, y, 0x7351);
    }
#pragma unroll
  for (int i = 0; i < 8; i += 2) {  // nibbles
    const std::uint32_t x = a[i], y = a[i + 1];
    a[i] = select_bits(0x0F0F'0F0Fu, x, y << 4), a[i + 1] = select_bits(0x0F0F'0F0Fu, x >> 4, y);
  }
}
}  // namespace minifloat::cuda
