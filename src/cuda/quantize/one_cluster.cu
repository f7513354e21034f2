// Casts of small matrices that scale by the current amax, in one launch: at most 8 tiles, a block
// each, in one cluster.
//
//     1  each block starts to load its tile; the cluster clears the amaxes
//     2  each block raises the amaxes from its tile in shared memory
//     3  each block casts its tile with the amaxes of all blocks
//
// Separate launches for each amax, and for clearing it, would take the host longer than the cast
// takes the device.
#include <array>
#include <atomic>

#include "cuda/common/reduce.cuh"
#include "cuda/quantize/general.cuh"

namespace minifloat::cuda {
namespace {

constexpr std::int64_t kMostTiles = 8;  // the largest cluster that every GPU schedules

__device__ __forceinline__ bool has_row_amax(const KernelOperand& plan) {
  return outer_scale(plan.rule) == OuterScale::kRow;
}

__device__ __forceinline__ void clear_amax(const KernelOperand& plan) {
  if (!plan.current_amax || plan.has_history) return;
  const std::uint32_t count = has_row_amax(plan) ? plan.rows : 1;
  for (std::uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads)
    plan.current_amax[i] = 0;
}

// Raises plan.current_amax by the amax of the tile, or of its rows as read.
template <bool kTransposed>
__device__ __forceinline__ void raise_amax(const KernelOperand& plan,
                                           const SharedTile<Bf16>& shared, const TilePlace& tile) {
  if (!plan.current_amax) return;
  const bool of_rows = has_row_amax(plan);
  const std::uint32_t first = kTransposed ? tile.col : tile.row;
  std::uint32_t of_tile = 0;
  shared.template each_vec<kTransposed>([&](const auto& vec, unsigned row) {
    std::uint32_t m = transform<Bf16>(plan, vec).amax();
    if (plan.points > 0) m = canonicalize_nan_magnitude(m);
    of_tile = max(of_tile, m);
    if (!of_rows) return;
    m = amax_of_lanes(m, 3);
    if (threadIdx.x % kVecColumns == 0 && first + row < plan.rows)
      atomicMax(plan.current_amax + first + row, m);
  });
  if (of_rows) return;
  raise_by_block(plan.current_amax, of_tile, plan.same_amax);
  __syncthreads();  // the next use of its shared memory waits
}

template <class Row, class Col>
__global__ void __launch_bounds__(kThreads)
    quantize_cluster(const __grid_constant__ KernelInput x,
                     const __grid_constant__ KernelOperand row,
                     const __grid_constant__ KernelOperand col,
                     const __grid_constant__ Tiles tiles) {
  constexpr bool kRow = !std::is_same_v<Row, Absent>, kCol = !std::is_same_v<Col, Absent>;
  extern __shared__ __align__(16) std::uint32_t words[];
  __shared__ std::uint32_t amaxes_2d[kBlocks2d];
  const TilePlace tile = tile_place(tiles);
  const TilePart part = {x, tile, false, 0, 0, 0};
  const SharedTile<Bf16> shared = {words};
  shared.fill(x, tile);
  if constexpr (kRow) clear_amax(row);
  if constexpr (kCol) clear_amax(col);
  sync_cluster();
  shared.wait();
  if constexpr (kRow) raise_amax<false>(row, shared, tile);
  if constexpr (kCol) raise_amax<true>(col, shared, tile);
  sync_cluster();
  if constexpr (kRow) cast_tile<Row, false>(row, shared, part, amaxes_2d, false);
  if constexpr (kCol) cast_tile<Col, true>(col, shared, part, amaxes_2d, false);
}

template <class Row, class Col>
void launch(const QuantizeArgs& args, const Execution& execution) {
  const Tiles tiles = tiles_of(args.x);
  const auto kernel = quantize_cluster<Row, Col>;
  constexpr std::size_t kBytes = SharedTile<Bf16>::kBytes;
  static_assert(kBytes <= 48 * 1024);
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {tile_grid(args.batch, tiles, "quantize"), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = cluster.val.clusterDim.x;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = kBytes;
  config.stream = cuda_stream(execution);
  config.attrs = &cluster;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, args.x, args.row, args.col, tiles);
  check_launch("quantize");
}

template <class Row, class Col>
LaunchCast find_pair_of(const QuantizeArgs& args) {
  return is_cast<Row>(args.row_spec) && is_cast<Col>(args.col_spec) ? launch<Row, Col> : nullptr;
}
template <class Row>
LaunchCast find_row(const QuantizeArgs& args) {
  return is_cast<Row>(args.row_spec) ? launch<Row, Absent> : nullptr;
}

// Returns whether the current device runs code with clusters: before compute capability 9.0 there
// are none, and a later GPU may run an earlier target's PTX. Each device is asked once.
bool has_clusters() {
  enum : std::uint8_t { kUnknown, kNo, kYes };
  static std::array<std::atomic<std::uint8_t>, 64> answers = {};
  int device = 0;
  check(cudaGetDevice(&device), "quantize");
  std::atomic<std::uint8_t>& answer = answers[static_cast<std::size_t>(device) % answers.size()];
  if (answer == kUnknown)
    answer = target_of(quantize_cluster<Cast<E4M3>, Absent>) >= 90 ? kYes : kNo;
  return answer == kYes;
}

}  // namespace

LaunchCast find_one_cluster(const QuantizeArgs& args) {
  if (!args.rowwise) return nullptr;
  if (!args.columnwise)
    return first_of(args, find_row<Cast<E4M3>>, find_row<Cast<E5M2>>, find_row<Cast<E2M1>>);
  return first_of(args, find_pair_of<Cast<E4M3>, Cast<E4M3>>, find_pair_of<Cast<E5M2>, Cast<E5M2>>,
                  find_pair_of<Cast<E2M1>, Cast<E2M1>>, find_pair_of<Cast<E4M3>, Cast<E2M1>>,
                  find_pair_of<Cast<E2M1>, Cast<E4M3>>);
}

bool fits_one_cluster(const QuantizeArgs& args) {
  const Tiles tiles = tiles_of(args.x);
  return args.is_bf16 && args.batch == 1 && !args.groups &&
         std::int64_t{tiles.across.d} * tiles.down.d <= kMostTiles && has_clusters();
}

}  // namespace minifloat::cuda
