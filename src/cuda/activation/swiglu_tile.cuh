// A tile of h in shared memory, which a block computes.
#pragma once

#include "cuda/activation/swiglu.cuh"
#include "cuda/common/groups.cuh"

namespace minifloat::cuda {

// Computes a tile of h, zero past the last row; every thread may read it after a barrier.
//   weights: room for those of the tile's rows
__device__ __forceinline__ void fill_with_h(const SwiGluArgs& of, const TilePart& part,
                                            const SharedTile<Bf16>& shared, float* weights) {
  constexpr unsigned kChunks = kTile / kSwiGluVec, kStep = kThreads / kChunks;
  const TilePlace& tile = part.tile;
  const unsigned chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
  const auto rows = static_cast<unsigned>(part.x.rows) - tile.row;
  const std::uint32_t begin = part.begin + tile.row - part.skip;
  const auto is_inside = [&](unsigned r) { return r >= part.skip && r - part.skip < rows; };
  if (threadIdx.x < kTile)
    weights[threadIdx.x] =
        is_inside(threadIdx.x) ? of.weight_at(of.place_of(begin + threadIdx.x)) : 0.0f;
  __syncthreads();
#pragma unroll 1
  for (unsigned r = first; r < kTile; r += kStep) {
    Vec8<Bf16> h = {};
    if (is_inside(r))
      h = h_of(of, load_gate_and_up(of, begin + r, tile.col + chunk * kSwiGluVec), weights[r]);
    h.store(reinterpret_cast<Bf16*>(shared.chunk_at(r, chunk)));
  }
}

}  // namespace minifloat::cuda
