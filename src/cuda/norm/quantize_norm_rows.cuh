// Rowwise casts of normalised values from one read of x: a warp or a block holds a row in
// registers, normalises it there, and casts it.
//
//     bytes an element: 2 of x, 1 or 1/2 of codes
#pragma once

#include "cuda/norm/quantize_norm.h"
#include "cuda/norm/row.cuh"
#include "cuda/quantize/preset_run.cuh"
#include "cuda/quantize/preset_table.cuh"

namespace minifloat::cuda {

// The most columns: two vec16s a thread of a block.
inline constexpr std::int64_t kMostCastCols = 2 * kThreads * kVec;

struct NormRowArgs {
  NormArgs of;
  KernelOperand plan;
  VecRun run;
};

// Returns the largest bit pattern of a row's threads, in each.
template <bool kByWarps>
__device__ __forceinline__ std::uint32_t max_of_row(std::uint32_t m) {
  m = warp_max(m);
  if constexpr (!kByWarps) {
    __shared__ std::uint32_t of_warp[kThreads / 32];
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = m;
    __syncthreads();
    m = warp_max(of_warp[threadIdx.x % (kThreads / 32)]);
  }
  return m;
}

// Casts a row with a scale of its own.
template <bool kByWarps, int kVecs>
__device__ __forceinline__ void cast_row_scaled(const NormRowArgs& args,
                                                const Vec16<Bf16> (&y)[kVecs], std::uint32_t row) {
  using Row = RegisterRow<Bf16, kVecs, kByWarps>;
  const KernelOperand& plan = args.plan;
  std::uint32_t m = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) m = max(m, y[i].amax());
  m = max_of_row<kByWarps>(m);
  if (row >= plan.rows) return;
  if (plan.amax) m = magnitude_bits(plan.amax[row]);
  const Window window = {plan.rows, plan.padded, 0, 0, 0};
  Place at = {0, row, row, 0, row};
  if (threadIdx.x % Row::kThreadsOfRow == 0) store_whole<E4M3>(plan, row, bit_cast<float>(m));
  const BlockScale block = block_scale<E4M3>(ScaleRule::kRow, plan.rounding, {}, m);
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    at.col = Row::col_of(i);
    if (at.col >= plan.padded) break;
    const Codes<E4M3> codes = encode_in_block<E4M3, false>(plan, ScaleRule::kRow, y[i], block, {});
    store_codes<E4M3>(plan, window, codes, at);
    if (plan.decoded) store_decoded<E4M3>(plan, window, codes, block.scale, at);
  }
}

template <class C, int kVecs, bool kByWarps>
__global__ void __launch_bounds__(kThreads, kVecs == 4 ? 2 : 3)
    quantize_norm_row(const __grid_constant__ NormRowArgs args) {
  using Row = RegisterRow<Bf16, kVecs, kByWarps>;
  __shared__ float shared[2][kNormRuns];
  __shared__ Whole whole;
  const NormArgs& of = args.of;
  const KernelOperand& plan = args.plan;
  const auto cols = static_cast<std::uint32_t>(of.x.cols);
  const std::uint32_t row = Row::row_of_thread();
  if (kIsShared<C> && threadIdx.x == 0) prepare<C>(plan, whole, 0, false);
  if constexpr (C::kRule != ScaleRule::kRow) store_parts<C>(plan, 1);
  Row x;
  x.load(of, row);
  const RowStatistics found = x.statistics(of, shared);
#pragma unroll
  for (int i = 0; i < kVecs; ++i)
    if (Row::col_of(i) < cols)  // else zeros
      x.vecs[i] = normalise_whole_vec(of, x.vecs[i], found, Row::col_of(i));
  if constexpr (C::kRule == ScaleRule::kRow) {
    cast_row_scaled<kByWarps>(args, x.vecs, row);
  } else {
    if constexpr (kIsShared<C> && kByWarps) __syncthreads();
    const MatrixScale scale = scale_of_whole<C>(plan, whole, 0);
    const bool is_inside = row < of.x.rows;
    std::uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const bool is_cast = is_inside && Row::col_of(i) < cols;
      const std::uint32_t u =
          is_cast ? row * args.run.vecs_of_row.d + Row::col_of(i) / kVec : args.run.count;
      cast_preset_vec<C, false>(args.run, plan, whole, scale, x.vecs[i], u,
                                plan.codes + std::uint64_t{u} * kVecBytes<typename C::F>);
      if (is_cast) largest = max(largest, x.vecs[i].amax());
    }
    if constexpr (kFindsCurrentAmax<C>) raise_current_amax(plan, 0, largest);
  }
}

// Casts by the kernels of a part of the table.   execution: null to ask whether there is one
template <preset::Formats kFormats>
bool launch_norm_rows(const NormArgs& of, const QuantizeArgs& args, const Execution* execution) {
  if (of.x.cols > kMostCastCols || (execution && !is_run(args))) return false;
  return launch_preset<kNormRowsWalk, kFormats>(args, true, false, [&]<class C, class>() {
    if (!execution) return;
    const NormRowArgs all = {of, args.row, run_of(args)};
    const auto launch = [&]<int kVecs, bool kByWarps>() {
      const std::int64_t of_block = RegisterRow<Bf16, kVecs, kByWarps>::kRowsOfBlock;
      const unsigned grid = grid_of(ceil_div(of.x.rows, of_block), "quantize_norm");
      quantize_norm_row<C, kVecs, kByWarps><<<grid, kThreads, 0, cuda_stream(*execution)>>>(all);
    };
    if (of.x.cols <= 4 * 32 * kVec)
      launch.template operator()<4, true>();
    else if (of.x.cols <= kThreads * kVec)
      launch.template operator()<1, false>();
    else
      launch.template operator()<2, false>();
    check_launch("quantize_norm");
  });
}

}  // namespace minifloat::cuda
