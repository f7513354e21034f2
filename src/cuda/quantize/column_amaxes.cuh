// The amaxes of the columns of rows that a block casts, of bf16. The threads of a team take a row
// together, a warp or the whole block, and each has the same columns of every row, in vectors of
// 2 * kPairs:
//
//     vector of a row    0   1   …  kTeam - 1    kTeam  …
//     thread             0   1   …  kTeam - 1    0      …
#pragma once

#include "cuda/common/launch.h"
#include "cuda/common/tile.cuh"
#include "cuda/quantize/general.cuh"

namespace minifloat::cuda {

inline constexpr int kWarp = 32;

// The largest magnitudes of the columns that a thread reads, in pairs.   kPairs: of a vector
template <int kVecs, int kPairs = kVec / 2>
struct ColumnAmaxes {
  std::uint32_t w[kVecs][kPairs] = {};
  // Takes the vector's columns.   pairs: its magnitudes
  __device__ __forceinline__ void take(int i, const std::uint32_t (&pairs)[kPairs]) {
#pragma unroll
    for (int k = 0; k < kPairs; ++k) w[i][k] = __vmaxu2(w[i][k], pairs[k]);
  }
  __device__ __forceinline__ void take(int i, const Vec16<Bf16>& vec) {
    std::uint32_t pairs[kPairs];
#pragma unroll
    for (int k = 0; k < kPairs; ++k) pairs[k] = vec.w[k] & 0x7FFF'7FFFu;
    take(i, pairs);
  }
};

// The shared memory of a block's columns. Lanes' words are so far apart that a warp's
// writes and reads meet no bank twice.
template <int kTeam, int kVecs, int kPairs = kVec / 2>
struct SharedColumns {
  static constexpr unsigned kTeams = kThreads / kTeam, kWarps = kTeam / kWarp;
  std::uint32_t words[kTeams][kVecs * kWarps][kPairs][kWarp + 4];
};

// Raises `out`, of a matrix, to the columns' amaxes of all threads of the block.   shared: read by
// no thread before
template <int kTeam, int kVecs, int kPairs>
__device__ __forceinline__ void raise_columns(const ColumnAmaxes<kVecs, kPairs>& columns,
                                              SharedColumns<kTeam, kVecs, kPairs>& shared,
                                              std::uint32_t cols, std::uint32_t* out) {
  using Shared = SharedColumns<kTeam, kVecs, kPairs>;
  constexpr unsigned kTeams = Shared::kTeams, kWarps = Shared::kWarps;
  const unsigned thread = threadIdx.x % kTeam;
#pragma unroll
  for (int i = 0; i < kVecs; ++i)
#pragma unroll
    for (int k = 0; k < kPairs; ++k)
      shared.words[threadIdx.x / kTeam][i * kWarps + thread / kWarp][k][thread % kWarp] =
          columns.w[i][k];
  __syncthreads();
  for (std::uint32_t pair = threadIdx.x; pair * 2 < cols; pair += kThreads) {
    const unsigned vec = pair / kPairs;
    std::uint32_t m = 0;
#pragma unroll
    for (unsigned t = 0; t < kTeams; ++t)
      m = __vmaxu2(m, shared.words[t][vec / kWarp][pair % kPairs][vec % kWarp]);
    atomicMax(out + pair * 2, m << 16);
    if (pair * 2 + 1 < cols) atomicMax(out + pair * 2 + 1, m & 0xFFFF'0000u);
  }
}

// Returns the memory of the columns' amaxes, zero.   parts: matrices or groups
inline std::uint32_t* cleared_columns(const QuantizeArgs& args, std::int64_t parts,
                                      cudaStream_t stream) {
  const auto count = static_cast<std::size_t>(parts * args.x.cols);
  check(cudaMemsetAsync(args.amaxes_of_columns, 0, count * sizeof(float), stream), "quantize");
  return reinterpret_cast<std::uint32_t*>(args.amaxes_of_columns);
}

}  // namespace minifloat::cuda
