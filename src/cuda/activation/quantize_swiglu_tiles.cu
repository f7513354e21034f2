// Casts of h by tiles, which a block computes in shared memory: columnwise, and both directions.
// Those of groups are the tiles of cuda/quantize/preset_group_tiles.cu.
//
//     bytes an element of h: 2 + 2 of gate and up, 1 or 1/2 of codes a direction
#include "cuda/activation/quantize_swiglu.h"
#include "cuda/activation/swiglu_tile.cuh"
#include "cuda/quantize/preset_table.cuh"
#include "cuda/quantize/preset_tile.cuh"

namespace minifloat::cuda {
namespace {

// Finds the tile of a block; without groups, the matrix is one. Returns false where the tile has no
// columns of a group.
__device__ __forceinline__ bool find_tile(const KernelInput& x, const DeviceGroups& groups,
                                          const Divisor& across, TilePart& part) {
  const std::uint32_t of_rows = across.divide(blockIdx.x),
                      col = (blockIdx.x - of_rows * across.d) * kTile;
  if (groups)
    return of_rows < tiles_of_groups(groups) &&
           find_tile_of_groups<Bf16>(x, groups, of_rows, col, part);
  part = {x, {0, of_rows * kTile, col}, true, 0, 0, static_cast<std::uint32_t>(x.rows)};
  return true;
}

template <class Row, class Col>
__global__ void __launch_bounds__(kThreads, 4)
    quantize_swiglu_tiles(const __grid_constant__ SwiGluArgs of,
                          const __grid_constant__ KernelInput x,
                          const __grid_constant__ KernelOperand row,
                          const __grid_constant__ KernelOperand col,
                          const __grid_constant__ DeviceGroups groups,
                          const __grid_constant__ Divisor across) {
  constexpr bool kRow = !std::is_same_v<Row, Absent>;
  extern __shared__ __align__(16) std::uint32_t words[];
  __shared__ float weights[kTile];
  __shared__ Whole whole[2];
  const SharedTile<Bf16> shared = {words};
  const std::uint32_t parts = groups ? groups.count : 1;
  if constexpr (kRow)
    if (is_wanted(row)) store_parts<Row>(row, parts);
  store_parts<Col>(col, parts);
  TilePart part;
  if (!find_tile(x, groups, across, part)) return;
  if constexpr (kRow)
    if (threadIdx.x == 0 && is_wanted(row)) prepare<Row>(row, whole[0], part.tile.batch, false);
  if (threadIdx.x == 32) prepare<Col>(col, whole[1], part.tile.batch, false);
  fill_with_h(of, part, shared, weights);
  __syncthreads();
  cast_group_tile<Row, Col>(row, col, whole, shared, part);
}

template <class Row, class Col>
void launch(const SwiGluArgs& of, const QuantizeArgs& args, const Execution& execution) {
  const Divisor across(args.x.cols / kTile);
  quantize_swiglu_tiles<Row, Col>
      <<<grid_of(most_tiles_of_groups(args) * across.d, "quantize_swiglu"), kThreads,
         SharedTile<Bf16>::kBytes, cuda_stream(execution)>>>(of, args.x, args.row, args.col,
                                                             args.groups, across);
  check_launch("quantize_swiglu");
}

}  // namespace

LaunchSwiGluCast find_swiglu_tiles(const QuantizeArgs& args) {
  if (args.x.cols % kTile != 0 || (!args.groups && args.x.rows % kTile != 0)) return nullptr;
  const auto of = [&]<class Row, class Col>() -> LaunchSwiGluCast { return launch<Row, Col>; };
  const LaunchSwiGluCast found = find_preset<kSwiGluTilesWalk>(args, of);
  return found || args.groups ? found : find_preset<kSwiGluMatrixWalk>(args, of);
}

}  // namespace minifloat::cuda
