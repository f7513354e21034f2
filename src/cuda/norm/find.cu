// The pass before a cast by tiles, or before one that scales by an amax: the statistics of rows,
// and the amaxes of the normalised values.
//
//     a block takes rows in turn, and its threads the same columns of each; so the largest
//     magnitudes of columns stay in registers, and go to memory once a block
//
//     bytes an element: 2 of x
#include "cuda/common/reduce.cuh"
#include "cuda/norm/quantize_norm.h"
#include "cuda/norm/row.cuh"

namespace minifloat::cuda {
namespace {

// The larger magnitudes of pairs of bf16, which stay apart.
__device__ __forceinline__ void raise_pairs(const Vec16<Bf16>& y, std::uint32_t (&m)[kVec / 2]) {
#pragma unroll
  for (int i = 0; i < kVec / 2; ++i) m[i] = __vmaxu2(m[i], y.w[i] & 0x7FFF'7FFFu);
}

// Raises the amaxes of columns by those of the block's threads, through shared memory, so that
// neighbouring lanes raise neighbouring columns.   pairs: (cols / 2)
template <int kVecs>
__device__ __forceinline__ void raise_columns(const std::uint32_t (&m)[kVecs][kVec / 2],
                                              std::uint32_t cols, std::uint32_t* pairs,
                                              std::uint32_t* out) {
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const std::uint32_t col = (threadIdx.x + i * kThreads) * kVec;
    if (col >= cols) break;
#pragma unroll
    for (int j = 0; j < kVec / 2; ++j) pairs[col / 2 + j] = m[i][j];
  }
  __syncthreads();
  for (std::uint32_t c = threadIdx.x; c < cols; c += kThreads) {
    const std::uint32_t pair = pairs[c / 2];
    atomicMax(out + c, canonical_magnitude(c % 2 ? pair & 0xFFFF'0000u : pair << 16));
  }
}

template <int kVecs, bool kByWarps, bool kCols>
__global__ void __launch_bounds__(kThreads, kVecs == 4 ? 2 : 3)
    find_in_rows(const __grid_constant__ NormArgs args, const __grid_constant__ FoundNorm found) {
  using Row = RegisterRow<Bf16, kVecs, kByWarps>;
  extern __shared__ std::uint32_t pairs[];
  __shared__ float shared[2][2]
                         [kNormRuns];  // a row's sums are read while the next one's are written
  const auto cols = static_cast<std::uint32_t>(args.x.cols);
  const auto rows = static_cast<std::uint32_t>(args.x.rows);
  const bool finds_amaxes = kCols || found.whole || found.rows;
  std::uint32_t of_cols[kCols ? kVecs : 1][kVec / 2] = {}, largest = 0;
  std::uint32_t parity = 0;
#pragma unroll 1
  for (std::uint32_t row = Row::row_of_thread(); row < rows;
       row += gridDim.x * Row::kRowsOfBlock, parity ^= 1) {
    Row x;
    x.load(args, row);
    const RowStatistics statistics = x.statistics(args, shared[parity]);
    if (found.statistics && threadIdx.x % Row::kThreadsOfRow == 0)
      found.statistics[row] = statistics;
    if (!finds_amaxes) continue;
    std::uint32_t of_row = 0;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      if (Row::col_of(i) >= cols) break;
      const Vec16<Bf16> y = normalise_whole_vec(args, x.vecs[i], statistics, Row::col_of(i));
      of_row = max(of_row, y.amax());
      if constexpr (kCols) raise_pairs(y, of_cols[i]);
    }
    largest = max(largest, of_row);
    if (!found.rows) continue;
    of_row = warp_max(of_row);
    if (threadIdx.x % 32 == 0) atomicMax(found.rows + row, canonical_magnitude(of_row));
  }
  if (!finds_amaxes) return;
  if constexpr (kCols) raise_columns<kVecs>(of_cols, cols, pairs, found.cols);
  if (found.whole) raise_by_block(found.whole, canonical_magnitude(largest));
}

template <int kVecs, bool kByWarps, bool kCols>
void launch(const NormArgs& of, const FoundNorm& found, const Execution& execution) {
  const auto kernel = find_in_rows<kVecs, kByWarps, kCols>;
  constexpr std::int64_t kRows = RegisterRow<Bf16, kVecs, kByWarps>::kRowsOfBlock;
  const std::size_t shared = kCols ? static_cast<std::size_t>(of.x.cols) * sizeof(Bf16) : 0;
  const unsigned grid = resident_grid(kernel, ceil_div(of.x.rows, kRows), shared, "quantize_norm");
  kernel<<<grid, kThreads, shared, cuda_stream(execution)>>>(of, found);
  check_launch("quantize_norm");
}

}  // namespace

void find_norm(const NormArgs& of, const FoundNorm& found, const Execution& execution) {
  with_register_row(of.x.cols, [&]<int kVecs, bool kByWarps>() {
    if (!found.cols)
      launch<kVecs, kByWarps, false>(of, found, execution);
    else if constexpr (kByWarps)
      launch<1, false, true>(of, found, execution);
    else
      launch<kVecs, false, true>(of, found, execution);
  });
}

}  // namespace minifloat::cuda
