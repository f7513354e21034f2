// Rowwise casts with a scale a row, from one read of x: a block holds a row in registers, computes
// its amax, and casts the row.
//
//     bytes an element: 2 or 4 of x, 1 of codes
#include "cuda/quantize/general.cuh"

namespace minifloat::cuda {
namespace {

// Casts row `at.row` of x, by all threads of the block.
template <class T, int kVecs>
__device__ __forceinline__ void cast_whole_row(const Source& x, const KernelOperand& plan,
                                               Place at) {
  __shared__ std::uint32_t of_warp[kThreads / 32];
  const T* row = row_of<T>(x, at.batch, at.row);
  const auto col_of = [](int i) { return (threadIdx.x + i * kThreads) * kVec; };

  // ---- The amax of the row
  Vec16<T> vecs[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i)
    vecs[i] = col_of(i) < plan.padded ? load_vec<T>(x, row, col_of(i)) : Vec16<T>{};
  std::uint32_t m = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) m = max(m, vecs[i].amax());
  m = __reduce_max_sync(kAllLanes, m);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = m;
  __syncthreads();
  m = __reduce_max_sync(kAllLanes, of_warp[threadIdx.x % (kThreads / 32)]);

  // ---- Cast
  const Window window = {plan.rows, plan.padded, 0, 0, 0};
  if (threadIdx.x == 0) store_whole<E4M3>(plan, at.all, bit_cast<float>(m));
  const BlockScale block = block_scale<E4M3>(ScaleRule::kRow, plan.rounding, {}, m);
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    at.col = col_of(i);
    if (at.col >= plan.padded) break;
    const Codes<E4M3> codes =
        encode_in_block<E4M3, false>(plan, ScaleRule::kRow, vecs[i], block, {});
    store_codes<E4M3>(plan, window, codes, at);
    if (plan.decoded) store_decoded<E4M3>(plan, window, codes, block.scale, at);
  }
}

template <class T, int kVecs>
__global__ void __launch_bounds__(kThreads, 16 / (kVecs + 1))
    quantize_whole_rows(const __grid_constant__ Source x,
                        const __grid_constant__ KernelOperand plan,
                        const __grid_constant__ Divisor rows_of_matrix) {
  Place at = {};
  at.all = at.line = blockIdx.x;
  at.batch = rows_of_matrix.divide(at.all);
  at.row = at.all - at.batch * rows_of_matrix.d;
  cast_whole_row<T, kVecs>(x, plan, at);
}
// Casts rows of groups: blocks take rows in turn, up to the last group's end.
template <class T, int kVecs>
__global__ void __launch_bounds__(kThreads, 16 / (kVecs + 1))
    quantize_whole_rows_of_groups(const __grid_constant__ Source x,
                                  const __grid_constant__ KernelOperand plan,
                                  const std::int32_t* last_end) {
  const std::uint32_t end = load_boundary(last_end, 0);
#pragma unroll 1
  for (std::uint32_t row = blockIdx.x; row < end; row += gridDim.x) {
    cast_whole_row<T, kVecs>(x, plan, {0, row, row, 0, row});
    __syncthreads();  // the next row uses the same shared memory
  }
}

template <class T, int kVecs>
bool launch(const QuantizeArgs& args, const Execution& execution) {
  const cudaStream_t stream = cuda_stream(execution);
  if (args.groups) {
    const auto kernel = quantize_whole_rows_of_groups<T, kVecs>;
    kernel<<<resident_grid(kernel, args.x.rows, 0, "quantize"), kThreads, 0, stream>>>(
        args.x, args.row, args.groups.rows + args.groups.count);
  } else {
    quantize_whole_rows<T, kVecs>
        <<<grid_of(args.batch * args.x.rows, "quantize"), kThreads, 0, stream>>>(
            args.x, args.row, Divisor(args.x.rows));
  }
  check_launch("quantize");
  return true;
}

template <class T>
bool launch_fitting(const QuantizeArgs& args, const Execution& execution) {
  const std::int64_t vecs = ceil_div<std::int64_t>(args.x.cols, kThreads * kVec);  // of a thread
  if (vecs <= 1) return launch<T, 1>(args, execution);
  if (vecs <= 2) return launch<T, 2>(args, execution);
  return vecs <= 4 && launch<T, 4>(args, execution);
}

}  // namespace

bool launch_whole_rows(const QuantizeArgs& args, const Execution& execution) {
  const Spec& spec = args.row_spec;
  if (spec.elements != Elements::kE4m3 || spec.stochastic || spec.transform > 0) return false;
  return args.is_bf16 ? launch_fitting<Bf16>(args, execution)
                      : launch_fitting<float>(args, execution);
}

}  // namespace minifloat::cuda
