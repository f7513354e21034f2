// The general kernels of quantization.
//
//     by rows       rowwise, blocks of one row
//     whole rows    rowwise, a scale a row that the kernel itself finds
//     by tiles      columnwise, 2D blocks, and both directions from one read
//
//     bytes an element: 2 or 4 of x, 1 or 1/2 of codes a direction, and a block's scale
#pragma once

#include "cuda/common/launch.h"
#include "cuda/quantize/cast_vec16.cuh"
#include "cuda/quantize/quantize.h"

namespace minifloat::cuda {

struct QuantizeArgs {
  KernelInput x;
  DeviceGroups groups;
  bool is_bf16;
  std::int64_t batch;
  bool rowwise, columnwise;  // what is cast; the other direction is empty below
  Spec row_spec, col_spec;
  KernelOperand row, col;
  float* amaxes_of_columns = nullptr;  // Operand's

  // Returns the arguments of a cast of one direction alone.
  QuantizeArgs of_direction(bool is_columnwise) const {
    QuantizeArgs one = *this;
    one.rowwise = !is_columnwise, one.columnwise = is_columnwise;
    (is_columnwise ? one.row : one.col) = {};
    (is_columnwise ? one.row_spec : one.col_spec) = {};
    return one;
  }
};

// ---- By rows ------------------------------------------------------------------------------------
__device__ __forceinline__ bool has_tensor_amax(const KernelOperand& plan) {
  return outer_scale(plan.rule) == OuterScale::kTensor;
}

template <class T, class C>
__global__ void __launch_bounds__(kThreads, 4)
    quantize_rows(const __grid_constant__ KernelInput x, const __grid_constant__ KernelOperand plan,
                  const __grid_constant__ DeviceGroups groups,
                  const __grid_constant__ RowVecs all_rows) {
  RowVecs layout = all_rows;
  if (!end_at_last_group(groups, layout)) return;
  const Window window = {plan.rows, plan.padded, 0, 0, 0};
  MatrixScale matrix = {};
  std::uint32_t batch = ~0u;
  each_vec_of_rows<T>(x, layout, [&](const Vec16<T>& vec, Place at) {
    if (at.all >= layout.end_row)
      at.row = plan.rows;
    else if (groups && has_tensor_amax(plan))
      at.batch = group_of_row(groups, at.all);
    if (at.batch != batch && at.row < plan.rows) {
      batch = at.batch;
      matrix = matrix_scale<typename C::F>(plan, plan.rule, plan.rounding, batch);
    }
    cast_vec<C, T>(plan, window, matrix, vec, at);
  });
}

template <class T, class C>
void launch_rows(const QuantizeArgs& args, const Execution& execution) {
  const KernelOperand& plan = args.row;
  const std::int64_t group = std::max(1 << plan.vecs_log2, std::max(plan.points, kVec) / kVec);
  each_launch_of_rows(
      args.batch, args.x, plan.padded, group, [&](const RowVecs& layout, unsigned grid) {
        quantize_rows<T, C>
            <<<grid, kThreads, 0, cuda_stream(execution)>>>(args.x, plan, args.groups, layout);
        check_launch("quantize");
      });
}

// ---- By tiles -----------------------------------------------------------------------------------
inline constexpr int kBlocks2d = kVecColumns * kVecColumns;  // the most in a tile: 16 x 16 each

// Returns the index of a vec16's block among the 2D blocks of a tile. is_flipped: `amaxes_2d` is
// the other direction's.
__device__ __forceinline__ unsigned block_2d_of(const KernelOperand& plan, unsigned row,
                                                unsigned vec_col, bool is_flipped = false) {
  return is_flipped ? (vec_col * kVec >> plan.height_log2) * kVecColumns + row / kVec
                    : (row >> plan.height_log2) * kVecColumns + vec_col;
}

// Computes the amaxes of the tile's 2D blocks.   amax_of: returns that of a vec16
template <bool kTransposed, class T, class AmaxOf>
__device__ __forceinline__ void amax_of_blocks_2d(const KernelOperand& plan,
                                                  const SharedTile<T>& shared,
                                                  std::uint32_t* amaxes_2d, AmaxOf amax_of) {
  __syncthreads();
  if (threadIdx.x < kBlocks2d) amaxes_2d[threadIdx.x] = 0;
  __syncthreads();
  shared.template each_vec<kTransposed>([&](const auto& vec, unsigned row) {
    std::uint32_t amax = amax_of_lanes(amax_of(vec), plan.vecs_log2);
    amax = max(amax, __shfl_xor_sync(kAllLanes, amax, 8));  // the 4 rows of a warp lie in one block
    amax = max(amax, __shfl_xor_sync(kAllLanes, amax, 16));
    if (threadIdx.x % 32 < kVecColumns)
      atomicMax(&amaxes_2d[block_2d_of(plan, row, threadIdx.x % kVecColumns)], amax);
  });
  __syncthreads();
}

// Adds the choice of each 2D block's scale to `amaxes_2d`. Rows are x's, except of transformed
// columns.
template <bool kTransposed, class T>
__device__ __forceinline__ void choose_in_blocks_2d(const KernelOperand& plan,
                                                    const SharedTile<T>& shared,
                                                    const MatrixScale& matrix,
                                                    std::uint32_t* amaxes_2d) {
  const bool is_down = kTransposed && plan.points > 0;
  __shared__ float errors[2][kBlocks2d][kVec];  // of the rows of a block, under its two scales
  const auto add_vec = [&](const auto& vec, unsigned row) {
    const Vec16<T> values = transform<T>(plan, vec);
    const unsigned block_2d =
        block_2d_of(plan, row, threadIdx.x % kVecColumns, kTransposed && !is_down);
    const Errors both = errors_of_vec(
        matrix, both_scales(plan.rule, plan.rounding, matrix, amaxes_2d[block_2d]), values);
    errors[0][block_2d][row % kVec] = both.first;
    errors[1][block_2d][row % kVec] = both.second;
  };
  if (is_down)
    shared.template each_vec<kTransposed>(add_vec);
  else
    shared.template each_vec<false>(add_vec);
  __syncthreads();
  if (threadIdx.x < kBlocks2d &&
      takes_second(add_rows(errors[0][threadIdx.x]), add_rows(errors[1][threadIdx.x])))
    amaxes_2d[threadIdx.x] |= kSecondScale;
  __syncthreads();
}

// Casts one direction of a tile.   has_amaxes: `amaxes_2d` holds the other direction's, of blocks
// of the same height
template <class C, bool kTransposed, class T>
__device__ __forceinline__ void cast_tile(const KernelOperand& plan, const SharedTile<T>& shared,
                                          const TilePart& part, std::uint32_t* amaxes_2d,
                                          bool has_amaxes) {
  const TilePlace& tile = part.tile;
  const bool is_2d = plan.height_log2 > 0;
  if (is_2d && !has_amaxes)
    amax_of_blocks_2d<kTransposed>(plan, shared, amaxes_2d,
                                   [&](const auto& vec) { return transform<T>(plan, vec).amax(); });
  const MatrixScale matrix =
      matrix_scale<typename C::F>(plan, plan.rule, plan.rounding, tile.batch);
  if constexpr (C::kReadsValues)
    if (is_2d) choose_in_blocks_2d<kTransposed>(plan, shared, matrix, amaxes_2d);
  const Window window = window_of<kTransposed>(part, plan.rows, plan.padded);
  const unsigned vec_col = threadIdx.x % kVecColumns;
  const std::uint32_t col = (kTransposed ? tile.row : tile.col) + vec_col * kVec;
  const std::uint32_t first = kTransposed ? tile.col : tile.row;
  shared.template each_vec<kTransposed>([&](const auto& vec, unsigned row) {
    const Place at = place_in(window, tile.batch, first + row, col);
    const unsigned of_block = block_2d_of(plan, row, vec_col, has_amaxes);
    cast_vec<C, T>(plan, window, matrix, vec, at, is_2d ? amaxes_2d + of_block : nullptr);
  });
}

template <class T, class Row, class Col>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 4 : 3)
    quantize_tile(const __grid_constant__ KernelInput x, const __grid_constant__ KernelOperand row,
                  const __grid_constant__ KernelOperand col,
                  const __grid_constant__ DeviceGroups groups,
                  const __grid_constant__ Tiles tiles) {
  constexpr bool kRow = !std::is_same_v<Row, Absent>, kCol = !std::is_same_v<Col, Absent>;
  extern __shared__ __align__(16) std::uint32_t words[];
  __shared__ std::uint32_t amaxes_2d[kBlocks2d];
  TilePart part;
  if (!find_part<T>(x, groups, tile_place(tiles), part)) return;
  const SharedTile<T> shared = {words};
  shared.fill(part.x, part.tile);
  shared.wait();
  if constexpr (kRow) cast_tile<Row, false>(row, shared, part, amaxes_2d, false);
  if constexpr (kRow && kCol) {
    const bool has_amaxes =
        row.points == 0 && col.points == 0 && row.height_log2 == col.height_log2;
    cast_tile<Col, true>(col, shared, part, amaxes_2d, has_amaxes);
  } else if constexpr (kCol) {
    cast_tile<Col, true>(col, shared, part, amaxes_2d, false);
  }
}

template <class T, class Row, class Col>
void launch_tiles(const QuantizeArgs& args, const Execution& execution) {
  const Tiles tiles = tiles_of(args.x, args.groups);
  const auto kernel = quantize_tile<T, Row, Col>;
  const unsigned grid = tile_grid(args.batch, tiles, "quantize");
  constexpr std::size_t kBytes = SharedTile<T>::kBytes;
  allow_shared(kernel, kBytes, "quantize");
  kernel<<<grid, kThreads, kBytes, cuda_stream(execution)>>>(args.x, args.row, args.col,
                                                             args.groups, tiles);
  check_launch("quantize");
}

// Launches the cast of one direction.
template <class T, class C>
void launch_direction(const QuantizeArgs& args, const Execution& execution) {
  if (args.columnwise)
    launch_tiles<T, Absent, C>(args, execution);
  else if (args.row.height_log2 > 0)
    launch_tiles<T, C, Absent>(args, execution);
  else
    launch_rows<T, C>(args, execution);
}
template <class C>
void launch_cast(const QuantizeArgs& args, const Execution& execution) {
  args.is_bf16 ? launch_direction<Bf16, C>(args, execution)
               : launch_direction<float, C>(args, execution);
}

template <class C>
bool is_cast(const Spec& spec) {
  return spec.elements == elements_of(typename C::F{}) && spec.reads_values() == C::kReadsValues;
}

}  // namespace minifloat::cuda
