// The preset casts of groups by tiles: columnwise, and both directions from one read. A launch has
// a block for each tile that the buffers have room for; blocks past the last group leave at once.
// (Resident blocks that took tiles in turn were 5 to 20% slower.)
#include "cuda/quantize/preset_table.cuh"
#include "cuda/quantize/preset_tile.cuh"

namespace minifloat::cuda {
namespace {

template <class Row, class Col>
__global__ void __launch_bounds__(kThreads, std::min(kBlocksOf<Row>, kBlocksOf<Col>))
    quantize_group_tiles(const __grid_constant__ KernelInput x,
                         const __grid_constant__ KernelOperand row,
                         const __grid_constant__ KernelOperand col,
                         const __grid_constant__ DeviceGroups groups,
                         const __grid_constant__ TileOrder order) {
  constexpr bool kRow = !std::is_same_v<Row, Absent>, kCol = !std::is_same_v<Col, Absent>;
  extern __shared__ __align__(16) std::uint32_t words[];
  __shared__ Whole whole[2];
  const SharedTile<Bf16> shared = {words};
  if constexpr (kRow)
    if (is_wanted(row)) store_parts<Row>(row, groups.count);
  if constexpr (kCol) store_parts<Col>(col, groups.count);
  const TileOrder::Tile tile = order.tile(blockIdx.x);
  if (tile.row >= tiles_of_groups(groups)) return;
  TilePart part;
  if (!find_tile_of_groups<Bf16>(x, groups, tile.row, tile.col * kTile, part)) return;
  shared.fill_rows(part.x, part.tile, part.skip);
  if constexpr (kRow)
    if (threadIdx.x == 0 && is_wanted(row)) prepare<Row>(row, whole[0], part.tile.batch, false);
  if constexpr (kCol)
    if (threadIdx.x == 32) prepare<Col>(col, whole[1], part.tile.batch, false);
  shared.wait();
  cast_group_tile<Row, Col>(row, col, whole, shared, part);
}

template <class Row, class Col>
void launch(const QuantizeArgs& args, const Execution& execution) {
  const std::int64_t down = most_tiles_of_groups(args), across = args.x.cols / kTile;
  quantize_group_tiles<Row, Col><<<grid_of(down * across, "quantize"), kThreads,
                                   SharedTile<Bf16>::kBytes, cuda_stream(execution)>>>(
      args.x, args.row, args.col, args.groups, tile_order(args.x, down, across));
  check_launch("quantize");
}

}  // namespace

LaunchCast find_preset_group_tiles(const QuantizeArgs& args) {
  if (!args.is_bf16) return nullptr;
  return find_preset<kGroupTilesWalk>(
      args, [&]<class Row, class Col>() -> LaunchCast { return launch<Row, Col>; });
}

}  // namespace minifloat::cuda
