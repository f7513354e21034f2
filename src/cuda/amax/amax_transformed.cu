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

template <class T>
__global__ void __launch_bounds__(kThreads, 5)
    amax_of_transformed_rows(const __grid_constant__ TransformedArgs args,
                             const __grid_constant__ RowVecs all_rows) {
  RowVecs layout = all_rows;
  if (!end_at_last_group(args.groups, layout)) return;
  std::uint32_t all = 0, batch = 0;
  each_vec_of_rows<T>(args.x, layout, [&](const Vec16<T>& vec, Place at) {
    const std::uint32_t m = hadamard_vec(vec, args.points, kHadamardSigns).amax();
    if (at.all >= layout.end_row) return;
    if (args.of_rows) {
      atomicMax(args.out + at.all, canonical_magnitude(m));
      return;
    }
    if (args.groups) at.batch = group_of_row(args.groups, at.all);
    if (at.batch == batch || all == 0) {
      all = max(all, m), batch = at.batch;
    } else {
      atomicMax(args.out + at.batch, canonical_magnitude(m));
    }
  });
  if (args.of_rows) return;
  // Threads of a block with different matrices or groups take different branches.
  std::uint32_t first, last;
  if (args.groups) {
    constexpr std::uint32_t kVecs = kThreads * kVecsOfRows;
    const std::uint32_t u = blockIdx.x * kVecs, end = layout.end_row - 1;
    first = group_of_row(args.groups, vec_place(layout, u).all);
    last = group_of_row(args.groups, min(vec_place(layout, u + kVecs - 1).all, end));
  } else {
    first = layout.rows_of_matrix.divide(layout.first_row);
    last = layout.rows_of_matrix.divide(layout.end_row - 1);
  }
  if (first == last)
    raise_by_block(args.out + first, canonical_magnitude(all));
  else
    atomicMax(args.out + batch, canonical_magnitude(all));
}

template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 5 : 3)
    amax_of_transformed_columns(const __grid_constant__ TransformedArgs args,
                                const __grid_constant__ Tiles tiles) {
  extern __shared__ __align__(16) std::uint32_t words[];
  TilePart part;
  if (!find_part<T>(args.x, args.groups, tile_place(tiles), part)) return;
  const TilePlace& tile = part.tile;
  const SharedTile<T> shared = {words};
  shared.fill(part.x, tile);
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
void launch(const AmaxRequest& r) {
  const Source x = source_of(r.x);
  const TransformedArgs args = {x,
                                device_groups(r.x.groups),
                                r.spec.transform,
                                r.spec.has_row_amax(),
                                static_cast<std::uint32_t>(r.columnwise ? x.cols : x.rows),
                                r.out};
  if (!r.columnwise)
    return each_launch_of_rows(r.x.batch, x, r.spec.padded_cols(x.cols), r.spec.transform / kVec,
                               [&](const RowVecs& layout, unsigned grid) {
                                 amax_of_transformed_rows<T>
                                     <<<grid, kThreads, 0, r.stream>>>(args, layout);
                                 check_launch("amax");
                               });
  const Tiles tiles = tiles_of(x, args.groups);
  constexpr std::size_t kBytes = SharedTile<T>::kBytes;
  const auto kernel = amax_of_transformed_columns<T>;
  allow_shared(kernel, kBytes, "amax");
  kernel<<<tile_grid(r.x.batch, tiles, "amax"), kThreads, kBytes, r.stream>>>(args, tiles);
  check_launch("amax");
}

}  // namespace

void launch_transformed(const AmaxRequest& request) {
  request.x.dtype == DType::kFloat32 ? launch<float>(request) : launch<Bf16>(request);
}

}  // namespace minifloat::cuda
