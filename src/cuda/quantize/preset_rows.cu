// The preset casts by rows: rowwise, a matrix without gaps.
#include <algorithm>

#include "cuda/quantize/preset.cuh"

namespace minifloat::cuda {
namespace {

// A matrix without gaps, as one run of vec16s.
struct VecRun {
  const uint4* x;
  std::uint32_t count;
  Divisor vecs_of_row;
};

// Returns vec16 u; zeros past the end.
__device__ __forceinline__ Vec16<Bf16> load_vec(const VecRun& run, std::uint32_t u) {
  Vec16<Bf16> vec = {};
  if (u >= run.count) return vec;
  const uint4* from = run.x + std::uint64_t{u} * 2;
  *reinterpret_cast<uint4*>(&vec) = __ldg(from);
  *(reinterpret_cast<uint4*>(&vec) + 1) = __ldg(from + 1);
  return vec;
}

// Casts vec16 u.   to: its codes
template <class C>
__device__ __forceinline__ void cast_vec(const VecRun& run, const KernelOperand& plan,
                                         const Whole& whole, const MatrixScale& scale,
                                         const Vec16<Bf16>& vec, std::uint32_t u,
                                         std::uint8_t* to) {
  const Transformed16 transformed = transform_preset<C>(vec);
  const std::uint32_t amax = C::kBlocks ? amax_of_lanes(transformed.amax, C::kVecsLog2) : 0;
  if (u >= run.count) return;  // its lane took part in the exchange
  const BlockScale block = scale_of_vec<C>(C::kRule, C::kRounding, scale, amax, transformed.vec);
  if constexpr (C::kBlocks)
    if (u % (1 << C::kVecsLog2) == 0) store_scale_at(plan, C::kRule, block, u >> C::kVecsLog2);
  RandomBits bits = {};
  if constexpr (C::kStochastic) {
    const std::uint32_t row = run.vecs_of_row.divide(u);
    bits = random_bits_at(whole, row, u - row * run.vecs_of_row.d);
  }
  encode_and_store<C>(plan, transformed, block, bits, to, u);
}

template <class C>
__global__ void __launch_bounds__(kThreads, 4)
    quantize_run(const __grid_constant__ VecRun run, const __grid_constant__ KernelOperand plan) {
  __shared__ Whole whole;
  const std::uint32_t first = blockIdx.x * (kThreads * kVecsOfRows) + threadIdx.x;
  constexpr int kStep = kThreads * kVecBytes<typename C::F>;
  std::uint8_t* const to = plan.codes + std::uint64_t{first} * kVecBytes<typename C::F>;
  if constexpr (C::kReadsValues) {
    // One copy of the body, with the next load in flight: four do not fit the instruction cache.
    Vec16<Bf16> next = load_vec(run, first);
    if (threadIdx.x == 0) prepare<C>(plan, whole);
    __syncthreads();
    const MatrixScale scale = scale_of_whole<C>(plan, whole);
#pragma unroll 1
    for (int i = 0; i < kVecsOfRows; ++i) {
      const Vec16<Bf16> vec = next;
      const std::uint32_t u = first + i * kThreads;
      if (i + 1 < kVecsOfRows) next = load_vec(run, u + kThreads);
      cast_vec<C>(run, plan, whole, scale, vec, u, to + i * kStep);
    }
  } else {
    Vec16<Bf16> vecs[kVecsOfRows];
#pragma unroll
    for (int i = 0; i < kVecsOfRows; ++i) vecs[i] = load_vec(run, first + i * kThreads);
    if (threadIdx.x == 0) prepare<C>(plan, whole);
    __syncthreads();
    const MatrixScale scale = scale_of_whole<C>(plan, whole);
    std::uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kVecsOfRows; ++i) {
      cast_vec<C>(run, plan, whole, scale, vecs[i], first + i * kThreads, to + i * kStep);
      if constexpr (kFindsCurrentAmax<C>)
        if (plan.current_amax) largest = max(largest, vecs[i].amax());
    }
    if constexpr (kFindsCurrentAmax<C>) raise_current_amax(plan, largest);
  }
}

template <class C>
void launch_run(const QuantizeArgs& args, const Execution& execution) {
  const std::int64_t of_row = args.x.cols / kVec, count = args.x.rows * of_row;
  const VecRun run = {static_cast<const uint4*>(args.x.data), static_cast<std::uint32_t>(count),
                      Divisor(of_row)};
  const unsigned grid = grid_of(ceil_div<std::int64_t>(count, kThreads * kVecsOfRows), "quantize");
  quantize_run<C><<<grid, kThreads, 0, cuda_stream(execution)>>>(run, args.row);
  check_launch("quantize");
}

template <class C>
bool try_run(const QuantizeArgs& args, const Execution& execution) {
  if (!is_of<C>(args.row_spec)) return false;
  launch_run<C>(args, execution);
  return true;
}
template <class Casts>
bool try_fp4(const QuantizeArgs& args, const Execution& execution) {
  return try_run<typename Casts::Straight>(args, execution) ||
         try_run<typename Casts::Random>(args, execution);
}

}  // namespace

bool launch_preset_rows(const QuantizeArgs& args, const Execution& execution) {
  using namespace preset;
  const std::int64_t block = std::max(args.row_spec.block_cols, kVec);
  const bool is_run = args.x.rows == 1 || args.x.row_stride == args.x.cols;
  if (!is_run || args.x.cols % block != 0 || args.row.height_log2 > 0 ||
      args.x.rows * args.x.cols / kVec >= (std::int64_t{1} << 31) - kThreads * kVecsOfRows)
    return false;
  return try_run<Nearest<kTensor, E4M3>>(args, execution) ||
         try_run<Nearest<kTensor, E5M2>>(args, execution) ||
         try_run<Nearest<kBlock, E4M3>>(args, execution) || try_run<Mxfp8>(args, execution) ||
         try_fp4<Mxfp4>(args, execution) || try_fp4<Nvfp4>(args, execution) ||
         try_fp4<Nvfp4Pow2>(args, execution) || try_run<Nvfp4FourOverSix>(args, execution);
}

}  // namespace minifloat::cuda
