// A tile of normalised values in shared memory, from x and the statistics of its rows.
#pragma once

#include "cuda/norm/row.cuh"

namespace minifloat::cuda {

// Computes a whole tile; every thread may read it after a barrier.
template <NormKind kKind>
__device__ __forceinline__ void fill_with_kind(const NormArgs& of, const RowStatistics* statistics,
                                               const TilePlace& tile,
                                               const SharedTile<Bf16>& shared) {
  constexpr unsigned kChunks = kTile / kNormChunk, kStep = kThreads / kChunks, kTogether = 4;
  const unsigned chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
  const std::uint32_t col = tile.col + chunk * kNormChunk;
  float w[kNormChunk], b[kNormChunk] = {};
  load_parameter_chunk(of.weight, col, w);
  if constexpr (kKind == NormKind::kLayer) load_parameter_chunk(of.bias, col, b);
  const Bf16* from = row_at<Bf16>(of.x, 0, tile.row + first) + col;
  const auto* rows = reinterpret_cast<const float2*>(statistics) + tile.row + first;
  const std::int64_t step = kStep * of.x.row_stride;
#pragma unroll 1
  for (unsigned begin = 0; begin < kTile; begin += kStep * kTogether) {
    uint4 in[kTogether];
    float2 row[kTogether];
#pragma unroll
    for (unsigned k = 0; k < kTogether; ++k, from += step) {
      in[k] = __ldg(reinterpret_cast<const uint4*>(from));
      row[k] = __ldg(rows + begin + k * kStep);
    }
#pragma unroll
    for (unsigned k = 0; k < kTogether; ++k)
      *reinterpret_cast<uint4*>(shared.chunk_at(first + begin + k * kStep, chunk)) =
          normalise_chunk<kKind>(in[k], {row[k].x, row[k].y}, w, b);
  }
}
__device__ __forceinline__ void fill_with_norm(const NormArgs& of, const RowStatistics* statistics,
                                               const TilePlace& tile,
                                               const SharedTile<Bf16>& shared) {
  if (of.kind == NormKind::kRms)
    fill_with_kind<NormKind::kRms>(of, statistics, tile, shared);
  else if (of.kind == NormKind::kRmsRounded)
    fill_with_kind<NormKind::kRmsRounded>(of, statistics, tile, shared);
  else
    fill_with_kind<NormKind::kLayer>(of, statistics, tile, shared);
}
static_assert(sizeof(RowStatistics) == sizeof(float2));

}  // namespace minifloat::cuda
