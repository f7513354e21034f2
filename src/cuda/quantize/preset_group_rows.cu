// The preset casts by rows of parts with a tensor scale each: groups, and the matrices of a batch.
// Each block takes a run of vec16s; blocks past the last group leave at once.
//
//     a run of a block     | part 3                    |      one scale, computed once
//                          | part 3        | 4 | 5     |      a scale for each vec16
#include "cuda/quantize/preset_run.cuh"
#include "cuda/quantize/preset_table.cuh"

namespace minifloat::cuda {
namespace {

// Casts a block's run of vec16s that lie in several parts.   u: the thread's first
template <class C>
__device__ __forceinline__ void cast_mixed_run(const VecRun& run, const KernelOperand& plan,
                                               const Parts& parts, const Whole& whole,
                                               std::uint32_t u, std::uint8_t* to) {
#pragma unroll 1
  for (int i = 0; i < kVecsOfRows; ++i, u += kThreads, to += kThreads * kVecBytes<typename C::F>) {
    const Vec16<Bf16> vec = load_vec<true>(run, u);
    const std::uint32_t part = parts.at(run.vecs_of_row.divide(min(u, run.count - 1)));
    const MatrixScale scale = matrix_scale<typename C::F>(plan, C::kRule, C::kRounding, part);
    cast_preset_vec<C, true>(run, plan, whole, scale, vec, u, to);
    if constexpr (kFindsCurrentAmax<C>)
      if (plan.current_amax && u < run.count) raise_current_amax_of_vec(plan, part, vec.amax());
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads, 4)
    quantize_runs(const __grid_constant__ VecRun all, const __grid_constant__ KernelOperand plan,
                  const __grid_constant__ Parts parts) {
  __shared__ Whole whole;
  VecRun run = all;
  if (parts.groups)
    run.count = load_boundary(parts.groups.rows, parts.groups.count) * run.vecs_of_row.d;
  store_parts<C>(plan, parts.count);
  const std::uint32_t first = blockIdx.x * kRun, u = first + threadIdx.x;
  if (first >= run.count) return;
  std::uint8_t* const to = plan.codes + std::uint64_t{u} * kVecBytes<typename C::F>;
  Vec16<Bf16> vecs[kVecsOfRows];
#pragma unroll
  for (int i = 0; i < kVecsOfRows; ++i) vecs[i] = load_vec<true>(run, u + i * kThreads);
  const auto [part, is_mixed] = find_first_part<C>(run, parts, first);
  if (threadIdx.x == 0) prepare<C>(plan, whole, part, false);
  __syncthreads();
  if (is_mixed) return cast_mixed_run<C>(run, plan, parts, whole, u, to);
  const MatrixScale scale = scale_of_whole<C>(plan, whole, part);
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kVecsOfRows; ++i) {
    cast_preset_vec<C, true>(run, plan, whole, scale, vecs[i], u + i * kThreads,
                             to + i * kThreads * kVecBytes<typename C::F>);
    if constexpr (kFindsCurrentAmax<C>)
      if (plan.current_amax) largest = max(largest, vecs[i].amax());
  }
  if constexpr (kFindsCurrentAmax<C>) raise_current_amax(plan, part, largest);
}

template <class C>
void launch(const QuantizeArgs& args, const Execution& execution) {
  const VecRun run = run_of(args);
  const unsigned grid = grid_of(ceil_div<std::int64_t>(run.count, kRun), "quantize");
  quantize_runs<C><<<grid, kThreads, 0, cuda_stream(execution)>>>(run, args.row, parts_of(args));
  check_launch("quantize");
}

}  // namespace

LaunchCast find_preset_group_rows(const QuantizeArgs& args) {
  if (!args.is_bf16 || !is_run(args) || args.x.rows == 0) return nullptr;
  return find_preset<kGroupRowsWalk>(args,
                                     [&]<class C, class>() -> LaunchCast { return launch<C>; });
}

}  // namespace minifloat::cuda
