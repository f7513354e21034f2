// The preset casts of matrices by rows: rowwise, without gaps between rows.
#include "cuda/quantize/preset_run.cuh"
#include "cuda/quantize/preset_table.cuh"

namespace minifloat::cuda {
namespace {

template <class C>
__global__ void __launch_bounds__(kThreads, 4)
    quantize_run(const __grid_constant__ VecRun run, const __grid_constant__ KernelOperand plan) {
  __shared__ Whole whole;
  const std::uint32_t first = blockIdx.x * (kThreads * kVecsOfRows) + threadIdx.x;
  constexpr int kStep = kThreads * C::kCodeBytes;
  std::uint8_t* const to = plan.codes + std::uint64_t{first} * C::kCodeBytes;
  if constexpr (C::kReadsValues) {
    // One copy of the body, with the next load in flight: four do not fit the instruction cache.
    Vec16<Bf16> next = load_vec(run, first);
    if (threadIdx.x == 0) prepare<C>(plan, whole, 0, blockIdx.x == 0);
    __syncthreads();
    const MatrixScale scale = scale_of_whole<C>(plan, whole, 0);
#pragma unroll 1
    for (int i = 0; i < kVecsOfRows; ++i) {
      const Vec16<Bf16> vec = next;
      const std::uint32_t u = first + i * kThreads;
      if (i + 1 < kVecsOfRows) next = load_vec(run, u + kThreads);
      cast_preset_vec<C, false>(run, plan, whole, scale, vec, u, to + i * kStep);
    }
  } else {
    Vec16<Bf16> vecs[kVecsOfRows];
#pragma unroll
    for (int i = 0; i < kVecsOfRows; ++i) vecs[i] = load_vec(run, first + i * kThreads);
    if (threadIdx.x == 0) prepare<C>(plan, whole, 0, blockIdx.x == 0);
    __syncthreads();
    const MatrixScale scale = scale_of_whole<C>(plan, whole, 0);
    std::uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kVecsOfRows; ++i) {
      cast_preset_vec<C, false>(run, plan, whole, scale, vecs[i], first + i * kThreads,
                                to + i * kStep);
      if constexpr (kFindsCurrentAmax<C>)
        if (plan.current_amax) largest = max(largest, vecs[i].amax());
    }
    if constexpr (kFindsCurrentAmax<C>) raise_current_amax(plan, 0, largest);
  }
}

template <class C>
void launch(const QuantizeArgs& args, const Execution& execution) {
  const VecRun run = run_of(args);
  const unsigned grid =
      grid_of(ceil_div<std::int64_t>(run.count, kThreads * kVecsOfRows), "quantize");
  quantize_run<C><<<grid, kThreads, 0, cuda_stream(execution)>>>(run, args.row);
  check_launch("quantize");
}

}  // namespace

LaunchCast find_preset_rows(const QuantizeArgs& args) {
  const bool has_parts = args.batch > 1 && args.row_spec.has_tensor_amax();
  if (!args.is_bf16 || args.groups || !is_run(args) || has_parts) return nullptr;
  return find_preset<kRowsWalk>(args, [&]<class C, class>() -> LaunchCast { return launch<C>; });
}

}  // namespace minifloat::cuda
