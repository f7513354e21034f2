// Amaxes of a tile in shared memory: of its rows, its columns, or its transformed columns; of each,
// or of all.
#pragma once

#include "cuda/common/tile.cuh"

namespace minifloat::cuda {

// Raises the amax of a line by those of the 8 lanes that share it.
__device__ __forceinline__ void raise_line(std::uint32_t m, std::uint32_t* of_line) {
  for (int lanes = 1; lanes < kVecColumns; lanes *= 2)
    m = max(m, __shfl_xor_sync(kAllLanes, m, lanes));
  if (threadIdx.x % kVecColumns == 0) atomicMax(of_line, canonicalize_nan_magnitude(m));
}

// Raise the amaxes of the tile's rows, or of its columns, by 256 threads.   out: that of the first
template <bool kTransposed>
__device__ __forceinline__ void raise_lines(const SharedTile<Bf16>& tile, std::uint32_t* out) {
  tile.template each_vec<kTransposed>(
      [&](const Vec16<Bf16>& vec, unsigned line) { raise_line(vec.amax(), out + line); });
}

// Raises the amaxes of the tile's columns with 16 points transformed, and returns the thread's
// largest.   out: that of the first column
__device__ __forceinline__ std::uint32_t raise_transformed_columns(const SharedTile<Bf16>& tile,
                                                                   std::uint32_t* out) {
  std::uint32_t all = 0;
  tile.each_vec<true>([&](const auto& vec, unsigned column) {
    const std::uint32_t m = hadamard_vec(vec, kVec, kHadamardSigns).amax();
    all = max(all, m);
    raise_line(m, out + column);
  });
  return canonicalize_nan_magnitude(all);
}

// Returns the largest magnitude of the thread's part of the tile: of its rows, or of its columns
// with 16 points transformed.
template <bool kTransformed>
__device__ __forceinline__ std::uint32_t amax_of_tile(const SharedTile<Bf16>& tile) {
  std::uint32_t m = 0;
  tile.template each_vec<kTransformed>([&](const auto& vec, unsigned) {
    if constexpr (kTransformed)
      m = max(m, hadamard_vec(vec, kVec, kHadamardSigns).amax());
    else
      m = max(m, vec.amax());
  });
  return canonicalize_nan_magnitude(m);
}

}  // namespace minifloat::cuda
