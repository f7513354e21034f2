// The amaxes that casts of h scale by, from a read of gate and up: of the whole matrix in
// registers, and of rows, columns and transformed columns of tiles.
//
//     bytes an element of h: 2 + 2 of gate and up
#include "cuda/common/layout.h"
#include "cuda/common/reduce.cuh"
#include "cuda/experts/found_amaxes.h"
#include "cuda/experts/quantize_swiglu.h"
#include "cuda/experts/swiglu_tile.cuh"
#include "cuda/experts/tile_amaxes.cuh"

namespace minifloat::cuda {
namespace {

constexpr const char* kName = "quantize_swiglu";
constexpr int kH = 1;  // its number among the matrices of SwiGluAmaxes

// ---- Of the whole matrix ------------------------------------------------------------------------
constexpr unsigned kVecsOfThread = 8;

// A block takes a run of vec8s, of rows one after the other.
__global__ void __launch_bounds__(kThreads)
    amax_of_swiglu(const __grid_constant__ SwiGluArgs of, const __grid_constant__ Divisor across,
                   std::uint32_t count, std::uint32_t* out) {
  std::uint32_t m = 0, u = blockIdx.x * (kThreads * kVecsOfThread) + threadIdx.x;
#pragma unroll 2
  for (unsigned i = 0; i < kVecsOfThread; ++i, u += kThreads) {
    if (u >= count) break;
    const std::uint32_t row = across.divide(u), col = (u - row * across.d) * kSwiGluVec;
    m = max(m, amax_of(h_of(of, load_gate_and_up(of, row, col), of.weight_at(of.place_of(row)))));
  }
  raise_by_block(out, canonical_magnitude(m));
}

// ---- Of tiles -----------------------------------------------------------------------------------
__global__ void __launch_bounds__(kThreads, 4)
    amax_of_swiglu_tiles(const __grid_constant__ SwiGluArgs of, const __grid_constant__ Source h,
                         const __grid_constant__ Divisor across,
                         const __grid_constant__ SwiGluAmaxes amaxes) {
  extern __shared__ __align__(16) std::uint32_t words[];
  __shared__ float weights[kTile];
  const SharedTile<Bf16> tile = {words};
  const std::uint32_t of_rows = across.divide(blockIdx.x),
                      col = (blockIdx.x - of_rows * across.d) * kTile;
  const TilePlace place = {0, of_rows * kTile, col};
  fill_with_h(of, {h, place, true, 0, 0, static_cast<std::uint32_t>(h.rows)}, tile, weights);
  __syncthreads();
  if (amaxes.rows[kH]) raise_lines<false>(tile, amaxes.rows[kH] + place.row);
  if (amaxes.cols[kH]) raise_lines<true>(tile, amaxes.cols[kH] + place.col);
  if (amaxes.whole[kH]) raise_by_block(amaxes.whole[kH], amax_of_tile<false>(tile));
  __syncthreads();
  if (amaxes.transformed[kH]) raise_by_block(amaxes.transformed[kH], amax_of_tile<true>(tile));
}

}  // namespace

void find_swiglu_amaxes(const SwiGluArgs& of, const TensorRef& h, const SwiGluAmaxes& amaxes,
                        const Execution& execution) {
  if (amaxes.of_rows_or_columns() || amaxes.of_transformed()) {
    const Divisor across(h.cols / kTile);
    amax_of_swiglu_tiles<<<grid_of(h.rows / kTile * across.d, kName), kThreads,
                           SharedTile<Bf16>::kBytes, cuda_stream(execution)>>>(of, source_of(h),
                                                                               across, amaxes);
  } else {
    const std::int64_t count = h.rows * h.cols / kSwiGluVec;
    const unsigned grid = grid_of(ceil_div<std::int64_t>(count, kThreads * kVecsOfThread), kName);
    amax_of_swiglu<<<grid, kThreads, 0, cuda_stream(execution)>>>(
        of, Divisor(h.cols / kSwiGluVec), static_cast<std::uint32_t>(count), amaxes.whole[kH]);
  }
  check_launch(kName);
}

}  // namespace minifloat::cuda
