// max |x| of transformed values, of the vec16s of tile.cuh.
//
//     bytes an element: 2 or 4
#include "cuda/amax/amax.h"
#include "cuda/common/groups.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/reduce.cuh"
#include "cuda/common/tile.cuh"

namespace minifloat::cuda {
namespace {

// The arguments of the transformed amaxes.   out: (batch) or (batch, rows as read), zero before
struct TransformedArgs {
  Source x;
  DeviceGroups groups;
  int points;
  bool of_rows;
  std::uint32_t rows;  // as read
  std::uint32_t* out;
};
// Raises the row's amax, where rows have one.   lanes: those that hold vec16s of the row
__device__ __forceinline__ void raise_row(const TransformedArgs& args, std::uint32_t m, int lanes,
                                          const Place& at) {
  for (int lane = 1; lane < lanes; lane *= 2) m = max(m, __shfl_xor_sync(kAllLanes, m, lane));
  if (at.col / kVec % lanes == 0 && at.row < args.rows)
    atomicMax(args.out + at.all, canonical_magnitude(m));
}

// ---- By rows ------------------------------------------------------------------------------------
template <class T>
__global__ void __launch_bounds__(kThreads, 5)
    amax_of_transformed_rows(const __grid_constant__ TransformedArgs args,
                             const __grid_constant__ RowVecs layout) {
  std::uint32_t all = 0, batch = 0;
  each_vec_of_rows<T>(args.x, layout, [&](const Vec16<T>& vec, const Place& at) {
    const std::uint32_t m = hadamard_vec(vec, args.points, kHadamardSigns).amax();
    if (at.all >= layout.end_row) return;
    if (args.of_rows) {
      atomicMax(args.out + at.all, canonical_magnitude(m));
    } else if (at.batch == batch || all == 0) {
      all = max(all, m), batch = at.batch;
    } else {
      atomicMax(args.out + at.batch, canonical_magnitude(m));
    }
  });
  if (args.of_rows) return;
  // Threads of a block with different matrices take different branches.
  const std::uint32_t first = layout.rows_of_matrix.divide(layout.first_row);
  if (layout.rows_of_matrix.divide(layout.end_row - 1) == first)
    raise_by_block(args.out + first, canonical_magnitude(all));
  else
    atomicMax(args.out + batch, canonical_magnitude(all));
}

// Takes groups. Blocks past the last group leave at once.
template <class T>
__global__ void __launch_bounds__(kThreads, 5)
    amax_of_transformed_group_rows(const __grid_constant__ TransformedArgs args,
                                   const __grid_constant__ RowVecs all_rows) {
  constexpr std::uint32_t kRun = kThreads * kVecsOfRows;
  RowVecs layout = all_rows;
  layout.end_row = min(layout.end_row, load_boundary(args.groups.rows, args.groups.count));
  if (layout.end_row <= layout.first_row) return;
  const std::uint32_t vecs = (layout.end_row - layout.first_row) * layout.vecs_of_row.d;
  const std::uint32_t u = blockIdx.x * kRun;
  if (u >= vecs) return;
  const std::uint32_t last = min(u + kRun, vecs) - 1;
  const std::uint32_t group = find_group_of_row(args.groups, vec_place(layout, u).all);
  const bool is_mixed = find_group_of_row(args.groups, vec_place(layout, last).all) != group;
  std::uint32_t all = 0;
  each_vec_of_rows<T>(args.x, layout, [&](const Vec16<T>& vec, const Place& at) {
    const std::uint32_t m = hadamard_vec(vec, args.points, kHadamardSigns).amax();
    if (at.all >= layout.end_row) return;
    if (args.of_rows)
      atomicMax(args.out + at.all, canonical_magnitude(m));
    else if (is_mixed)
      atomicMax(args.out + group_of_row(args.groups, at.all), canonical_magnitude(m));
    else
      all = max(all, m);
  });
  if (!args.of_rows && !is_mixed) raise_by_block(args.out + group, canonical_magnitude(all));
}

// ---- By tiles -----------------------------------------------------------------------------------
template <class T>
__device__ __forceinline__ void take_amax_of_tile(const TransformedArgs& args, const Source& x,
                                                  const TilePlace& tile) {
  extern __shared__ __align__(16) std::uint32_t words[];
  const SharedTile<T> shared = {words};
  if (x.aligned && tile.col + kTile <= x.cols)
    shared.fill_rows(x, tile, 0);
  else
    shared.fill(x, tile);
  shared.wait();
  std::uint32_t all = 0;
  const std::uint32_t col = tile.row + threadIdx.x % kVecColumns * kVec;
  shared.template each_vec<true>([&](const auto& vec, unsigned row) {
    const std::uint32_t m = hadamard_vec(vec, args.points, kHadamardSigns).amax();
    all = max(all, m);
    const std::uint32_t in_matrix = tile.col + row;
    const std::uint32_t of_all = tile.batch * args.rows + in_matrix;
    if (args.of_rows) raise_row(args, m, kVecColumns, {tile.batch, in_matrix, of_all, col, of_all});
  });
  if (!args.of_rows) raise_by_block(args.out + tile.batch, canonical_magnitude(all));
}
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 5 : 3)
    amax_of_transformed_columns(const __grid_constant__ TransformedArgs args,
                                const __grid_constant__ Tiles tiles) {
  take_amax_of_tile<T>(args, args.x, tile_place(tiles));
}
// Takes groups. Blocks past the last group leave at once.
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 5 : 3)
    amax_of_transformed_group_columns(const __grid_constant__ TransformedArgs args,
                                      const __grid_constant__ Divisor across) {
  const std::uint32_t of_rows = across.divide(blockIdx.x), tile = of_rows * kTile;
  if (tile >= load_boundary(args.groups.tiles, args.groups.count)) return;
  const TilePart part =
      part_of_group<T>(args.x, args.groups, {0, tile, (blockIdx.x - of_rows * across.d) * kTile});
  take_amax_of_tile<T>(args, part.x, part.tile);
}

// ---- Launches -----------------------------------------------------------------------------------
template <class T>
void launch_rows(const TransformedArgs& args, const AmaxRequest& r) {
  each_launch_of_rows(r.x.batch, args.x, r.spec.padded_cols(args.x.cols), r.spec.transform / kVec,
                      [&](const RowVecs& layout, unsigned grid) {
                        if (args.groups) {
                          const auto kernel = amax_of_transformed_group_rows<T>;
                          kernel<<<grid, kThreads, 0, r.stream>>>(args, layout);
                        } else {
                          amax_of_transformed_rows<T>
                              <<<grid, kThreads, 0, r.stream>>>(args, layout);
                        }
                        check_launch("amax");
                      });
}
template <class T>
void launch_columns(const TransformedArgs& args, const AmaxRequest& r) {
  const Tiles tiles = tiles_of(args.x, args.groups);
  constexpr std::size_t kBytes = SharedTile<T>::kBytes;
  const unsigned grid = tile_grid(r.x.batch, tiles, "amax");
  if (args.groups) {
    const auto kernel = amax_of_transformed_group_columns<T>;
    allow_shared(kernel, kBytes, "amax");
    kernel<<<grid, kThreads, kBytes, r.stream>>>(args, tiles.across);
  } else {
    const auto kernel = amax_of_transformed_columns<T>;
    allow_shared(kernel, kBytes, "amax");
    kernel<<<grid, kThreads, kBytes, r.stream>>>(args, tiles);
  }
  check_launch("amax");
}
template <class T>
void launch(const AmaxRequest& r) {
  const Source x = source_of(r.x);
  const TransformedArgs args = {x,
                                device_groups(r.x.groups),
                                r.spec.transform,
                                r.spec.has_row_amax(),
                                static_cast<std::uint32_t>(r.columnwise ? x.cols : x.rows),
                                r.out};
  r.columnwise ? launch_columns<T>(args, r) : launch_rows<T>(args, r);
}

}  // namespace

void launch_transformed(const AmaxRequest& request) {
  request.x.dtype == DType::kFloat32 ? launch<float>(request) : launch<Bf16>(request);
}

}  // namespace minifloat::cuda
