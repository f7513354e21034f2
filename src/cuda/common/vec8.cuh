// Eight neighbouring columns, the part of a row that a thread takes at a time: one load of 16 bytes
// in bf16, two in fp32.
#pragma once

#include <cstdint>

#include "cuda/common/ptx.cuh"
#include "cuda/common/tile.cuh"
#include "minifloat/core/swiglu.h"

namespace minifloat::cuda {

inline constexpr int kRowThreads = 256;  // of a block
inline constexpr int kRowWarps = kRowThreads / 32;
inline constexpr int kLanes = kSwiGluLanes;

// The columns of `kVecs` vec8s, one after the other.
template <class T, int kVecs = 1>
struct Vec8 {
  static constexpr int kColumns = kVecs * kSwiGluVec;
  static constexpr int kWords = kColumns * static_cast<int>(sizeof(T)) / 4;
  static constexpr int kChunks = kWords / 4;
  alignas(16) std::uint32_t w[kWords];  // read and written as uint4

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) return bit_cast<float>(w[i]);
    return bit_cast<float>(i % 2 ? w[i / 2] & 0xFFFF'0000u : w[i / 2] << 16);
  }
  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
      *reinterpret_cast<uint4*>(w + 4 * i) = __ldg(reinterpret_cast<const uint4*>(from) + i);
  }
  __device__ __forceinline__ void store(T* to) const {
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
      reinterpret_cast<uint4*>(to)[i] = *reinterpret_cast<const uint4*>(w + 4 * i);
  }
  // Load and store the first `count` elements, of any alignment.
  __device__ __forceinline__ void load_some(const T* from, int count) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) w[i] = 0;
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      if (i < count) set_bits(i, from[i]);
  }
  __device__ __forceinline__ void store_some(T* to, int count) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      if (i < count) to[i] = bits(i);
  }
  // Rounds two neighbours. A NaN of bf16 has other bits until canonicalize_nans.
  __device__ __forceinline__ void set_pair(int i, float first, float second) {
    if constexpr (sizeof(T) == 4) {
      w[i] = bit_cast<std::uint32_t>(canonicalize_nan(first));
      w[i + 1] = bit_cast<std::uint32_t>(canonicalize_nan(second));
    } else {
      w[i / 2] = cvt_bf16x2(first, second);
    }
  }
  // Gives each NaN the bits that every backend writes. The conversion's NaN is 0x7FFF.
  __device__ __forceinline__ void canonicalize_nans() {
    if constexpr (sizeof(T) == 2) {
      std::uint32_t carries = 0;
#pragma unroll
      for (int i = 0; i < kWords; ++i) carries |= (w[i] + 0x0001'0001u) & ~w[i];
      if ((carries & 0x8000'8000u) == 0) return;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const std::uint32_t nan = (w[i] + 0x0001'0001u) & ~w[i] & 0x8000'8000u;
        w[i] -= (nan >> 15) * (0x7FFFu - BF16::kNanBits);
      }
    }
  }

 private:
  __device__ __forceinline__ T bits(int i) const {
    if constexpr (sizeof(T) == 4) return bit_cast<T>(w[i]);
    return static_cast<T>(w[i / 2] >> (i % 2 * 16));
  }
  __device__ __forceinline__ void set_bits(int i, T x) {
    if constexpr (sizeof(T) == 4)
      w[i] = bit_cast<std::uint32_t>(x);
    else
      w[i / 2] |= static_cast<std::uint32_t>(x) << (i % 2 * 16);
  }
};

// Returns whether rows from `data` on, `stride` bytes apart, start at multiples of 16 bytes.
inline bool has_aligned_rows(const void* data, std::int64_t stride, std::int64_t rows) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && (rows <= 1 || stride % 16 == 0);
}

}  // namespace minifloat::cuda
