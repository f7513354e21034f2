// The values and the statistics of a normalisation. A warp or a block holds a row in registers; of
// rows of more than 16384 columns a block reads the values once for each sum, and once more.
//
//     bytes an element: 2 or 4 of x, 2 or 4 of y
#include "cuda/norm/norm.h"

#include "cuda/backend.h"
#include "cuda/common/launch.h"
#include "cuda/norm/row.cuh"

namespace minifloat::cuda {
namespace {

// The outputs; null: not written.
struct NormOutputs {
  void* y;                 // (rows, cols)
  float *factors, *means;  // (rows)

  __device__ __forceinline__ void store(std::uint32_t row, const RowStatistics& found) const {
    if (factors) factors[row] = with_one_nan(found.factor);
    if (means) means[row] = with_one_nan(found.mean);
  }
};

template <class T, int kVecs, bool kByWarps>
__global__ void __launch_bounds__(kThreads)
    norm_rows(const __grid_constant__ NormArgs args, const __grid_constant__ NormOutputs out) {
  using Row = RegisterRow<T, kVecs, kByWarps>;
  __shared__ float shared[2][kNormRuns];
  const std::uint32_t row = Row::row_of_thread();
  const auto cols = static_cast<std::uint32_t>(args.x.cols);
  Row x;
  x.load(args, row);
  const RowStatistics found = x.statistics(args, shared);
  if (row >= args.x.rows) return;
  if (threadIdx.x % Row::kThreadsOfRow == 0) out.store(row, found);
  if (!out.y) return;
#pragma unroll
  for (int i = 0; i < kVecs; ++i)
    if (const std::uint32_t col = Row::col_of(i); col < cols)
      store_values(normalise_vec<T>(args, x.vecs[i], found, col), out.y, row, col, cols,
                   args.stores_vecs);
}

template <class T, bool kSquares>
__device__ __forceinline__ float sum_of_long_row(const NormArgs& args, std::uint32_t row,
                                                 float mean, float (&of_warp)[kNormRuns]) {
  const int cols = static_cast<int>(args.x.cols);
  float partial[kNormPartials] = {};
#pragma unroll 1
  for (int col = static_cast<int>(threadIdx.x) * kVec; col < cols; col += kThreads * kVec)
    add_terms<kSquares>(load_row_vec<T>(args, row, static_cast<std::uint32_t>(col)), mean,
                        cols - col, partial);
  return sum_of_block(sum_by_halves(partial), of_warp);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    norm_long_rows(const __grid_constant__ NormArgs args, const __grid_constant__ NormOutputs out) {
  __shared__ float shared[2][kNormRuns];
  const std::uint32_t row = blockIdx.x;
  const auto cols = static_cast<std::uint32_t>(args.x.cols);
  const auto count = static_cast<float>(cols);
  RowStatistics found;
  if (args.kind == NormKind::kLayer)
    found.mean = __fdiv_rn(sum_of_long_row<T, false>(args, row, 0.0f, shared[0]), count);
  found.factor =
      norm_factor(sum_of_long_row<T, true>(args, row, found.mean, shared[1]), count, args.eps);
  if (threadIdx.x == 0) out.store(row, found);
  if (!out.y) return;
#pragma unroll 1
  for (std::uint32_t col = threadIdx.x * kVec; col < cols; col += kThreads * kVec) {
    const Vec16<T> x = load_row_vec<T>(args, row, col);
    store_values(normalise_vec<T>(args, x, found, col), out.y, row, col, cols, args.stores_vecs);
  }
}

template <class T>
void launch(NormArgs args, const NormOutputs& out, const Execution& execution) {
  const cudaStream_t stream = cuda_stream(execution);
  const std::int64_t rows = args.x.rows;
  args.stores_vecs = args.stores_vecs && reinterpret_cast<std::uintptr_t>(out.y) % 16 == 0;
  const bool fits = with_register_row(args.x.cols, [&]<int kVecs, bool kByWarps>() {
    const std::int64_t of_block = RegisterRow<T, kVecs, kByWarps>::kRowsOfBlock;
    norm_rows<T, kVecs, kByWarps>
        <<<grid_of(ceil_div(rows, of_block), "norm"), kThreads, 0, stream>>>(args, out);
  });
  if (!fits) norm_long_rows<T><<<grid_of(rows, "norm"), kThreads, 0, stream>>>(args, out);
  check_launch("norm");
}

void run(const Norm& of, const NormOutputs& out, const Execution& execution) {
  of.dtype == DType::kFloat32 ? launch<float>(norm_args(of), out, execution)
                              : launch<Bf16>(norm_args(of), out, execution);
}

NormParameter parameter(const void* data, DType dtype, float absent) {
  return {data, dtype == DType::kBFloat16, reinterpret_cast<std::uintptr_t>(data) % 16 == 0,
          absent};
}

}  // namespace

NormArgs norm_args(const Norm& of) {
  const std::int64_t size = of.dtype == DType::kFloat32 ? 4 : 2;
  TensorRef x = of.y_at(of.x);
  x.row_stride = of.row_stride;
  const bool stores_vecs = of.rows <= 1 || of.cols * size % 16 == 0;
  return {source_of(x),
          parameter(of.weight, of.weight_dtype, 1.0f),
          parameter(of.bias, of.bias_dtype, -0.0f),
          of.kind,
          of.eps,
          stores_vecs};
}

void norm(const Norm& of, void* y, const Execution& execution) {
  run(of, {y, nullptr, nullptr}, execution);
}

void norm_statistics(const Norm& of, float* factors, float* means, const Execution& execution) {
  run(of, {nullptr, factors, means}, execution);
}

}  // namespace minifloat::cuda
