// The preset casts by long rows that may lie apart, in x or in the codes, of bf16 or fp32: those of
// messages, which are rows (minifloat/messages.h). The vec16s of a block of threads are of one row.
//
//     bytes an element: 2 or 4 of x, 1 or 1/2 of codes, and a block's scale
#include "cuda/quantize/preset.cuh"
#include "cuda/quantize/preset_table.cuh"

namespace minifloat::cuda {
namespace {

template <class T>
constexpr unsigned kAtOnce = 8 / sizeof(T);  // vec16s of a thread, all of which it loads first
template <class T>
constexpr unsigned kOfBlock = kAtOnce<T> * kThreads;

template <class C, class T>
__global__ void __launch_bounds__(kThreads, 4)
    quantize_strided_rows(const __grid_constant__ KernelInput x,
                          const __grid_constant__ KernelOperand plan,
                          const __grid_constant__ Divisor blocks_of_row) {
  static_assert(C::kBlocks && !C::kIsBlock2d && !C::kTransform && !C::kReadsValues);
  __shared__ Whole whole;
  const std::uint32_t row = blocks_of_row.divide(blockIdx.x);
  const std::uint32_t first =
      (blockIdx.x - row * blocks_of_row.d) * kOfBlock<T> + threadIdx.x;  // in vec16s of the row
  const std::uint32_t end = static_cast<std::uint32_t>(x.cols) / kVec;
  const T* const from = row_at<T>(x, 0, row) + std::uint64_t{first} * kVec;
  Vec16<T> vecs[kAtOnce<T>];
#pragma unroll
  for (unsigned i = 0; i < kAtOnce<T>; ++i) {
    vecs[i] = {};
    if (first + i * kThreads < end) vecs[i] = load_vec(from + i * (kThreads * kVec));
  }
  if (threadIdx.x == 0) prepare<C>(plan, whole, 0, blockIdx.x == 0);
  __syncthreads();
  const std::uint64_t line = row;
  const std::uint64_t scale = line * plan.scale_cols + (first >> C::kVecsLog2),
                      vec = line * (plan.padded / kVec) + first;
  std::uint8_t* const to =
      plan.codes + line * plan.code_pitch + std::uint64_t{first} * C::kCodeBytes;
#pragma unroll
  for (unsigned i = 0; i < kAtOnce<T>; ++i) {
    const std::uint32_t at = first + i * kThreads;
    const auto transformed = transform_preset<C>(vecs[i]);
    const std::uint32_t amax = amax_of_lanes(transformed.amax, C::kVecsLog2);
    if (at >= end) continue;  // its lane took part in the exchange
    const BlockScale block = block_scale<typename C::F>(C::kRule, C::kRounding, {}, amax);
    if (at % (1 << C::kVecsLog2) == 0)
      store_scale_at(plan, C::kRule, block,
                     C::kMaySwizzle && plan.swizzled
                         ? swizzled_index(row, at >> C::kVecsLog2, plan.scale_cols)
                         : scale + i * (kThreads >> C::kVecsLog2));
    RandomBits bits = {};
    if constexpr (C::kStochastic) bits = random_bits_at(whole, row, at);
    encode_and_store<C>(plan, transformed, block, bits, to + i * (kThreads * C::kCodeBytes),
                        vec + i * kThreads);
  }
}

template <class C, class T>
void launch(const QuantizeArgs& args, const Execution& execution) {
  const Divisor blocks_of_row(ceil_div<std::int64_t>(args.x.cols, kVec * kOfBlock<T>));
  const unsigned grid = grid_of(args.x.rows * blocks_of_row.d, "quantize");
  quantize_strided_rows<C, T>
      <<<grid, kThreads, 0, cuda_stream(execution)>>>(args.x, args.row, blocks_of_row);
  check_launch("quantize");
}

}  // namespace

LaunchCast find_preset_strided_rows(const QuantizeArgs& args) {
  const std::int64_t of_block = args.is_bf16 ? kOfBlock<Bf16> : kOfBlock<float>;
  const bool is_long = args.x.cols / kVec >= of_block / 2;  // else most threads have none
  if (args.groups || args.batch > 1 || args.x.cols % kVec != 0 || !is_long) return nullptr;
  return find_preset<kStridedRowsWalk>(args, [&]<class C, class>() -> LaunchCast {
    return args.is_bf16 ? launch<C, Bf16> : launch<C, float>;
  });
}

}  // namespace minifloat::cuda
