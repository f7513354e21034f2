// Rowwise casts of h as it is computed. A block takes a run of vec16s. While a warp waits for a
// load, others compute, for longer than the load takes.
//
//     bytes an element of h: 2 + 2 of gate and up, 1 or 1/2 of codes
#include "cuda/activation/quantize_swiglu.h"
#include "cuda/activation/swiglu.cuh"
#include "cuda/quantize/preset_run.cuh"
#include "cuda/quantize/preset_table.cuh"

namespace minifloat::cuda {
namespace {

// The rows of h, as one run of vec16s, which are computed instead of loaded.
struct SwiGluRun : VecRun {
  SwiGluArgs of;
};

// Computes vec16 u; zeros past the end.
__device__ __forceinline__ Vec16<Bf16> compute_vec(const SwiGluRun& run, std::uint32_t u) {
  Vec16<Bf16> vec = {};
  if (u >= run.count) return vec;
  const std::uint32_t row = run.vecs_of_row.divide(u), col = (u - row * run.vecs_of_row.d) * kVec;
  const GateAndUp8 in[2] = {load_gate_and_up(run.of, row, col),
                            load_gate_and_up(run.of, row, col + kSwiGluVec)};
  const float weight = run.of.weight_at(run.of.place_of(row));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Vec8<Bf16> h = h_of(run.of, in[half], weight);
#pragma unroll
    for (int i = 0; i < 4; ++i) vec.w[4 * half + i] = h.w[i];
  }
  return vec;
}

// kSwizzled: scales may be swizzled, whose indices take more registers
template <class C, bool kSwizzled>
__global__ void __launch_bounds__(kThreads, C::kStochastic ? 4 : 5)
    quantize_swiglu_runs(const __grid_constant__ SwiGluRun all,
                         const __grid_constant__ KernelOperand plan,
                         const __grid_constant__ Parts parts) {
  __shared__ Whole whole;
  SwiGluRun run = all;
  if (parts.groups)
    run.count = load_boundary(parts.groups.rows, parts.groups.count) * run.vecs_of_row.d;
  store_parts<C>(plan, parts.count);
  const std::uint32_t first = blockIdx.x * kRun;
  if (first >= run.count) return;
  const auto [part, is_mixed] = find_first_part<C>(run, parts, first);
  std::uint32_t largest = 0;
  if constexpr (C::kStochastic) {
    if (threadIdx.x == 0) prepare<C>(plan, whole, 0, false);
    __syncthreads();
  }
  std::uint32_t u = first + threadIdx.x;
#pragma unroll 1
  for (int i = 0; i < kVecsOfRows; ++i, u += kThreads) {
    const Vec16<Bf16> vec = compute_vec(run, u);
    std::uint32_t own = part;
    if (is_mixed) own = parts.at(run.vecs_of_row.divide(min(u, run.count - 1)));
    cast_preset_vec<C, true, kSwizzled>(run, plan, whole, scale_of_whole<C>(plan, whole, own), vec,
                                        u,
                                        plan.codes + std::uint64_t{u} * kVecBytes<typename C::F>);
    if constexpr (kFindsCurrentAmax<C>) {
      if (!plan.current_amax || u >= run.count) continue;
      if (is_mixed)
        raise_current_amax_of_vec(plan, own, vec.amax());
      else
        largest = max(largest, vec.amax());
    }
  }
  if constexpr (kFindsCurrentAmax<C>) raise_current_amax(plan, part, largest);
}

template <class C, bool kSwizzled>
void launch(const SwiGluArgs& of, const QuantizeArgs& args, const Execution& execution) {
  static_assert(!(kIsShared<C> && kHasTensorScale<C>), "a run may lie in parts of other scales");
  const SwiGluRun run = {run_of(args), of};
  const unsigned grid = grid_of(ceil_div<std::int64_t>(run.count, kRun), "quantize_swiglu");
  quantize_swiglu_runs<C, kSwizzled>
      <<<grid, kThreads, 0, cuda_stream(execution)>>>(run, args.row, parts_of(args));
  check_launch("quantize_swiglu");
}

}  // namespace

LaunchSwiGluCast find_swiglu_rows(const QuantizeArgs& args) {
  if (!is_run(args)) return nullptr;
  return find_preset<kSwiGluRowsWalk>(args, [&]<class C, class>() -> LaunchSwiGluCast {
    return args.row.swizzled ? launch<C, C::kMaySwizzle> : launch<C, false>;
  });
}

}  // namespace minifloat::cuda
