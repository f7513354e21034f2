// Casts of the gradients of gate and up, and of h, from one read of dh, gate and up: the kernel,
// which quantize_gradients_fp8.cu and quantize_gradients_fp4.cu compile for the specs of presets.
// Half of a block casts rows, and then h, while the other half casts columns. Every matrix has
// whole tiles.
//
//     bytes an element: 6 read; 5 written with codes of a byte (FP8, and FP4 written as FP8), 2.5
//     with those of half a byte
#pragma once

#include "cuda/activation/gradient_plans.cuh"
#include "cuda/activation/gradient_tile.cuh"
#include "cuda/activation/quantize_swiglu.h"
#include "cuda/quantize/preset_table.cuh"
#include "cuda/quantize/preset_tile.cuh"

namespace minifloat::cuda {

static_assert(kGradientThreads == 2 * kThreads);

// Casts both directions of a tile's matrices by half of the block each.
template <class Row, class Col, class H>
__global__ void __launch_bounds__(kGradientThreads, 2)
    quantize_gradients(const __grid_constant__ GradientArgs args,
                       const __grid_constant__ GradientPlans plans) {
  extern __shared__ __align__(16) std::uint32_t words[];
  __shared__ Whole whole[5];
  __shared__ std::uint32_t largest[3];
  const GradientTile tiles = {words};
  const TilePlace place = gradient_place(args);
  const int matrices = args.of.up ? 2 : 1;
  const GradientChunk loaded = tiles.first(args, place);

  // ---- What holds for whole matrices
  const bool is_first = place.row == 0 && place.col == 0;
  if (threadIdx.x < 3) largest[threadIdx.x] = 0;
  if (threadIdx.x == 32 && args.has_h) prepare<H>(plans.h, whole[4], 0, is_first);
  const int of = static_cast<int>(threadIdx.x) / 32 - 2;  // warps 2 to 5
  if (threadIdx.x % 32 == 0 && 0 <= of && of < 4 && of % 2 < matrices) {
    if (of < 2)
      prepare<Row>(plans.row[of % 2], whole[of], 0, is_first);
    else
      prepare<Col>(plans.col[of % 2], whole[of], 0, is_first);
  }
  __syncthreads();

  // ---- The gradients, and h
  LargestPairs pairs;
  tiles.compute<true>(args, place, loaded, pairs);
  if constexpr (kFindsCurrentAmax<Row>)
    if (plans.finds_amaxes) raise_in_block(pairs, largest);
  __syncthreads();
  if constexpr (kFindsCurrentAmax<Row>)
    if (threadIdx.x < 6 && plans.current_amax[threadIdx.x])
      atomicMax(plans.current_amax[threadIdx.x], largest[threadIdx.x % 3]);

  // ---- The casts
  if (threadIdx.x < kThreads) {
#pragma unroll 1
    for (int i = 0; i < matrices; ++i)
      cast_preset_tile<Row, false, false, false>(plans.row[i], whole[i], tiles.tile(2 * i),
                                                 tile_of_matrix<false>(plans.row[i], place),
                                                 nullptr);
    if (args.has_h)
      cast_preset_tile<H, true, false, false>(plans.h, whole[4], tiles.tile(1),
                                              tile_of_matrix<true>(plans.h, place), nullptr);
  } else {
#pragma unroll 1
    for (int i = 0; i < matrices; ++i)
      cast_preset_tile<Col, true, false, false>(plans.col[i], whole[2 + i], tiles.tile(2 * i),
                                                tile_of_matrix<true>(plans.col[i], place), nullptr);
  }
}

template <class Row, class Col, class H>
void launch_gradients(const GradientArgs& args, const GradientPlans& plans,
                      const Execution& execution) {
  const auto kernel = quantize_gradients<Row, Col, H>;
  const std::size_t bytes = args.shared_bytes();
  allow_shared(kernel, bytes, "quantize_swiglu_backward");
  const std::int64_t tiles = args.of.rows / kTile * args.across.d;
  kernel<<<grid_of(tiles, "quantize_swiglu_backward"), kGradientThreads, bytes,
           cuda_stream(execution)>>>(args, plans);
  check_launch("quantize_swiglu_backward");
}

// Returns the launch of a kernel of a part of the table; null where none fits.
template <preset::Formats kFormats>
LaunchGradients find_gradients(const GradientSpecs& specs) {
  using namespace preset;
  LaunchGradients found = nullptr;
  any_of(GradientTable{}, [&]<class Entry>() {
    if constexpr (kIsCompiled<Entry, kFormats>) {
      using Row = typename Entry::Row;
      using Col = typename Entry::Col;
      using H = typename Entry::H;
      if (!is_cast_by<Row>(&specs.row, specs.as_fp8) ||
          !is_cast_by<Col>(&specs.col, specs.as_fp8) ||
          (specs.has_h && !is_cast_by<H>(&specs.h, specs.as_fp8)))
        return false;
      found = launch_gradients<Row, Col, H>;
      return true;
    } else {
      return false;
    }
  });
  return found;
}

}  // namespace minifloat::cuda
