// Casts of normalised values by tiles, which a block computes in shared memory: columnwise, and
// both directions.
//
//     bytes an element: 2 of x, 1 or 1/2 of codes a direction
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/norm/quantize_norm.h"
#include "cuda/norm/tile.cuh"
#include "cuda/quantize/preset_table.cuh"
#include "cuda/quantize/preset_tile.cuh"

namespace minifloat::cuda {

template <class Row, class Col>
__global__ void __launch_bounds__(kThreads, 4)
    quantize_norm_tile(const __grid_constant__ NormArgs of, const RowStatistics* statistics,
                       const __grid_constant__ KernelOperand row,
                       const __grid_constant__ KernelOperand col,
                       const __grid_constant__ Tiles tiles) {
  constexpr bool kRow = !std::is_same_v<Row, Absent>;
  extern __shared__ __align__(16) std::uint32_t words[];
  __shared__ Whole whole[2];
  const TilePlace tile = tile_place(tiles);
  const bool is_first = tile.row == 0 && tile.col == 0;
  const SharedTile<Bf16> shared = {words};
  if constexpr (kRow)
    if (threadIdx.x == 0 && is_wanted(row)) prepare<Row>(row, whole[0], 0, is_first);
  if (threadIdx.x == 32) prepare<Col>(col, whole[1], 0, is_first);
  fill_with_norm(of, statistics, tile, shared);
  __syncthreads();
  if constexpr (kRow)
    if (is_wanted(row))
      cast_preset_tile<Row, false, false, false>(row, whole[0], shared,
                                                 tile_of_matrix<false>(row, tile), nullptr);
  cast_preset_tile<Col, true, false, false>(col, whole[1], shared, tile_of_matrix<true>(col, tile),
                                            nullptr);
}

// Casts by the kernels of a part of the table.   execution: null to ask whether there is one
template <preset::Formats kFormats>
bool launch_norm_tiles(const NormArgs& of, const RowStatistics* statistics,
                       const QuantizeArgs& args, bool rowwise, const Execution* execution) {
  return launch_preset<kNormTilesWalk, kFormats>(args, rowwise, true, [&]<class Row, class Col>() {
    if (!execution) return;
    const Tiles tiles = tiles_of(of.x);
    quantize_norm_tile<Row, Col>
        <<<tile_grid(1, tiles, "quantize_norm"), kThreads, SharedTile<Bf16>::kBytes,
           cuda_stream(*execution)>>>(of, statistics, row_plan(args, rowwise), args.col, tiles);
    check_launch("quantize_norm");
  });
}

}  // namespace minifloat::cuda
