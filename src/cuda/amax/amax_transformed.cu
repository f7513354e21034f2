// max |x| of transformed values, of the vec16s of tile.cuh.
//
//     bytes an element: 2 or 4
#include "cuda/amax/amax.h"
#include "cuda/common/groups.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/reduce.cuh"
#include "cuda/common/signs.cuh"
#include "cuda/common/tile.cuh"

namespace minifloat::cuda {
namespace {

// The arguments of the transformed amaxes. The outputs are zero before; null: not written.
struct TransformedArgs {
  KernelInput x;
  DeviceGroups groups;
  int points;
  SignSource signs;
  std::uint32_t rows;       // as read
  std::uint32_t* of_rows;   // (batch, rows as read)
  std::uint32_t* of_parts;  // (batch), or (groups); by rows, instead of those of rows
};
// Raises the row's amax, where rows have one.   lanes: those that hold vec16s of the row
__device__ __forceinline__ void raise_row(const TransformedArgs& args, std::uint32_t m, int lanes,
                                          const Place& at) {
  for (int lane = 1; lane < lanes; lane *= 2) m = max(m, __shfl_xor_sync(kAllLanes, m, lane));
  if (at.col / kVec % lanes == 0 && at.row < args.rows)
    atomicMax(args.of_rows + at.all, canonicalize_nan_magnitude(m));
}

// ---- By rows ------------------------------------------------------------------------------------
// The transform's largest magnitude in a vec16.
class AmaxOfVec {
 public:
  __device__ __forceinline__ explicit AmaxOfVec(const TransformedArgs& args)
      : points_(args.points),
        flips_(args.signs.state != nullptr),
        mask_(flips_ ? signs_of_lane(args.signs.flips()) : 0) {}
  template <class T>
  __device__ __forceinline__ std::uint32_t operator()(Vec16<T> vec) const {
    if (flips_) flip(vec, mask_);
    return hadamard_vec(vec, points_, kHadamardSigns).amax();
  }

 private:
  int points_;
  bool flips_;
  std::uint32_t mask_;
};

template <class T>
__global__ void __launch_bounds__(kThreads, 5)
    amax_of_transformed_rows(const __grid_constant__ TransformedArgs args,
                             const __grid_constant__ RowVecs layout) {
  const AmaxOfVec amax_of(args);
  std::uint32_t all = 0, batch = 0;
  each_vec_of_rows<T>(args.x, layout, [&](const Vec16<T>& vec, const Place& at) {
    const std::uint32_t m = amax_of(vec);
    if (at.all >= layout.end_row) return;
    if (args.of_rows) {
      atomicMax(args.of_rows + at.all, canonicalize_nan_magnitude(m));
    } else if (at.batch == batch || all == 0) {
      all = max(all, m), batch = at.batch;
    } else {
      atomicMax(args.of_parts + at.batch, canonicalize_nan_magnitude(m));
    }
  });
  if (args.of_rows) return;
  // Threads of a block with different matrices take different branches.
  const std::uint32_t first = layout.rows_of_matrix.divide(layout.first_row);
  if (layout.rows_of_matrix.divide(layout.end_row - 1) == first)
    raise_by_block(args.of_parts + first, canonicalize_nan_magnitude(all));
  else
    atomicMax(args.of_parts + batch, canonicalize_nan_magnitude(all));
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
  const AmaxOfVec amax_of(args);
  std::uint32_t all = 0;
  each_vec_of_rows<T>(args.x, layout, [&](const Vec16<T>& vec, const Place& at) {
    const std::uint32_t m = amax_of(vec);
    if (at.all >= layout.end_row) return;
    if (args.of_rows)
      atomicMax(args.of_rows + at.all, canonicalize_nan_magnitude(m));
    else if (is_mixed)
      atomicMax(args.of_parts + group_of_row(args.groups, at.all), canonicalize_nan_magnitude(m));
    else
      all = max(all, m);
  });
  if (!args.of_rows && !is_mixed)
    raise_by_block(args.of_parts + group, canonicalize_nan_magnitude(all));
}

// ---- By tiles -----------------------------------------------------------------------------------
// Returns the largest magnitude of a vec16. The bits of a NaN stay, as in the amaxes of amax.cu.
__device__ __forceinline__ std::uint32_t largest_bits(const Vec16<Bf16>& vec) {
  std::uint32_t m = 0;
#pragma unroll
  for (const std::uint32_t w : vec.w) m = __vmaxu2(m, w & 0x7FFF'7FFFu);
  return max(m & 0xFFFF'0000u, m << 16);
}

// Raises the untransformed amaxes of a tile: of the tensor, and of each row where `rows` is not
// null.
__device__ __forceinline__ void take_untransformed_amax_of_tile(const SharedTile<Bf16>& shared,
                                                                const TilePlace& tile,
                                                                std::uint32_t count,
                                                                const UntransformedAmaxes& to) {
  std::uint32_t all = 0;
  shared.each_vec<false>([&](const auto& vec, unsigned row) {
    std::uint32_t m = largest_bits(vec);
    all = max(all, m);
    if (!to.rows) return;
    for (int lane = 1; lane < kVecColumns; lane *= 2)
      m = max(m, __shfl_xor_sync(kAllLanes, m, lane));
    if (threadIdx.x % kVecColumns == 0 && tile.row + row < count)
      atomicMax(to.rows + tile.row + row, m);
  });
  raise_by_block(to.tensor, all);
  __syncthreads();  // the next use of its shared memory waits
}

// untransformed: untransformed amaxes of a matrix, from the same read; null: none
template <class T>
__device__ __forceinline__ void take_amax_of_tile(
    const TransformedArgs& args, const KernelInput& x, const TilePlace& tile,
    const UntransformedAmaxes* untransformed = nullptr) {
  extern __shared__ __align__(16) std::uint32_t words[];
  const SharedTile<T> shared = {words};
  if (x.aligned && tile.col + kTile <= x.cols)
    shared.fill_rows(x, tile, 0);
  else
    shared.fill(x, tile);
  __shared__ HadamardSigns flips;
  if (args.signs.state && threadIdx.x == 0) flips = args.signs.flips();
  shared.wait();
  if (args.signs.state) shared.flip_rows(flips);
  if constexpr (sizeof(T) == 2)
    if (untransformed)
      take_untransformed_amax_of_tile(shared, tile, static_cast<std::uint32_t>(x.rows),
                                      *untransformed);
  std::uint32_t all = 0;
  const std::uint32_t col = tile.row + threadIdx.x % kVecColumns * kVec;
  shared.template each_vec<true>([&](const auto& vec, unsigned row) {
    const std::uint32_t m = hadamard_vec(vec, args.points, kHadamardSigns).amax();
    all = max(all, m);
    const std::uint32_t in_matrix = tile.col + row;
    const std::uint32_t of_all = tile.batch * args.rows + in_matrix;
    if (args.of_rows) raise_row(args, m, kVecColumns, {tile.batch, in_matrix, of_all, col, of_all});
  });
  if (args.of_parts) raise_by_block(args.of_parts + tile.batch, canonicalize_nan_magnitude(all));
}
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 5 : 3)
    amax_of_transformed_columns(const __grid_constant__ TransformedArgs args,
                                const __grid_constant__ Tiles tiles) {
  take_amax_of_tile<T>(args, args.x, tile_place(tiles));
}
// Takes both from one read of a bf16 matrix: the untransformed amaxes too.
__global__ void __launch_bounds__(kThreads, 5)
    amax_with_and_without_transform(const __grid_constant__ TransformedArgs args,
                                    const __grid_constant__ UntransformedAmaxes untransformed,
                                    const __grid_constant__ Tiles tiles) {
  take_amax_of_tile<Bf16>(args, args.x, tile_place(tiles), &untransformed);
}
// Takes groups. Blocks past the last group leave at once.
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 5 : 3)
    amax_of_transformed_group_columns(const __grid_constant__ TransformedArgs args,
                                      const __grid_constant__ TileOrder order) {
  const TileOrder::Tile tile = order.tile(blockIdx.x);
  if (tile.row * kTile >= load_boundary(args.groups.tiles, args.groups.count)) return;
  const TilePart part =
      part_of_group<T>(args.x, args.groups, {0, tile.row * kTile, tile.col * kTile});
  take_amax_of_tile<T>(args, part.x, part.tile);
}

// ---- Launches -----------------------------------------------------------------------------------
template <class T>
void launch_rows(const TransformedArgs& args, const AmaxRequest& r) {
  each_launch_of_rows(r.x.batch, args.x, r.of.spec.padded_cols(args.x.cols),
                      r.of.spec.transform / kVec, [&](const RowVecs& layout, unsigned grid) {
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
    kernel<<<grid, kThreads, kBytes, r.stream>>>(args,
                                                 tile_order(args.x, tiles.down.d, tiles.across.d));
  } else if (r.untransformed.tensor) {
    constexpr std::size_t kBf16Bytes = SharedTile<Bf16>::kBytes;
    amax_with_and_without_transform<<<grid, kThreads, kBf16Bytes, r.stream>>>(args, r.untransformed,
                                                                              tiles);
  } else {
    const auto kernel = amax_of_transformed_columns<T>;
    allow_shared(kernel, kBytes, "amax");
    kernel<<<grid, kThreads, kBytes, r.stream>>>(args, tiles);
  }
  check_launch("amax");
}
template <class T>
void launch(const AmaxRequest& r) {
  const KernelInput x = kernel_input(r.x);
  const bool of_rows = r.of.spec.has_row_amax();
  const TransformedArgs args = {x,
                                device_groups(r.x.groups),
                                r.of.spec.transform,
                                sign_source(r.of.spec, r.of.random),
                                static_cast<std::uint32_t>(r.of.columnwise ? x.cols : x.rows),
                                of_rows ? r.out : r.rows,
                                of_rows ? nullptr : r.out};
  r.of.columnwise ? launch_columns<T>(args, r) : launch_rows<T>(args, r);
}

}  // namespace

void launch_transformed(const AmaxRequest& request) {
  request.x.dtype == DType::kFloat32 ? launch<float>(request) : launch<Bf16>(request);
}

}  // namespace minifloat::cuda
