// A preset cast of the vec16s of rows, numbered from 0 on: of matrices without gaps, or of groups,
// whose rows may lie anywhere.
#pragma once

#include <algorithm>

#include "cuda/quantize/preset.cuh"

namespace minifloat::cuda {

// The vec16s of all rows of x, numbered row after row.
struct VecRun {
  const uint4* x;
  std::uint32_t count;
  Divisor vecs_of_row;
  const std::int32_t* rows_from;  // of groups: KernelInput's; then rows lie `pitch` chunks apart
  std::int64_t pitch;
  std::uint32_t last_row;  // KernelInput's
};

// Returns vec16 u; zeros past the end.   kInGroup: its row may lie anywhere
template <bool kInGroup = false>
__device__ __forceinline__ Vec16<Bf16> load_vec(const VecRun& run, std::uint32_t u) {
  Vec16<Bf16> vec = {};
  if (u >= run.count) return vec;
  const uint4* from = run.x + std::uint64_t{u} * 2;
  if constexpr (kInGroup)
    if (run.rows_from) {
      const std::uint32_t row = run.vecs_of_row.divide(u);
      const std::uint32_t at =
          min(static_cast<std::uint32_t>(__ldg(run.rows_from + row)), run.last_row);
      from = run.x + at * run.pitch + (u - row * run.vecs_of_row.d) * 2;
    }
  *reinterpret_cast<uint4*>(&vec) = __ldg(from);
  *(reinterpret_cast<uint4*>(&vec) + 1) = __ldg(from + 1);
  return vec;
}

// Casts vec16 u.   to: its codes; kHasIds: rows may have numbers of their own in the random
// counter; kMaySwizzle: scales may be swizzled
template <class C, bool kHasIds, bool kMaySwizzle = C::kMaySwizzle>
__device__ __forceinline__ void cast_preset_vec(const VecRun& run, const KernelOperand& plan,
                                                const Whole& whole, const MatrixScale& scale,
                                                const Vec16<Bf16>& vec, std::uint32_t u,
                                                std::uint8_t* to) {
  const Transformed16 transformed = transform_preset<C>(vec);
  const std::uint32_t amax = C::kBlocks ? amax_of_lanes(transformed.amax, C::kVecsLog2) : 0;
  if (u >= run.count) return;  // its lane took part in the exchange
  const BlockScale block = scale_of_vec<C>(C::kRule, C::kRounding, scale, amax, transformed.vec);
  if constexpr (C::kBlocks && !C::kAsFp8)
    if (u % (1 << C::kVecsLog2) == 0) {
      if (kMaySwizzle && plan.swizzled) {
        const std::uint32_t row = run.vecs_of_row.divide(u);
        const std::uint32_t col = (u - row * run.vecs_of_row.d) >> C::kVecsLog2;
        store_scale_at(plan, C::kRule, block, swizzled_index(row, col, plan.scale_cols));
      } else {
        store_scale_at(plan, C::kRule, block, u >> C::kVecsLog2);
      }
    }
  float row_factor = 1.0f;
  if constexpr (C::kAsFp8) {
    const std::uint32_t row = run.vecs_of_row.divide(u);
    row_factor = fp8_row_factor<C>(plan, scale, row);
    if (u == row * run.vecs_of_row.d) store_fp8_row_scale(plan, scale, row, row_factor);
  }
  RandomBits bits = {};
  if constexpr (C::kStochastic) {
    const std::uint32_t row = run.vecs_of_row.divide(u);
    bits =
        random_bits_at(whole, counter_row<kHasIds>(plan, whole, row), u - row * run.vecs_of_row.d);
  }
  encode_and_store<C>(plan, transformed, block, bits, to, u, row_factor);
}

inline constexpr std::uint32_t kRun = kThreads * kVecsOfRows;  // vec16s of a block at a time

// ---- Parts with a tensor scale each: groups, or the matrices of a batch -------------------------
struct Parts {
  DeviceGroups groups;
  Divisor rows_of_matrix;  // without groups
  std::uint32_t count;

  // Return the part of a row: by the whole warp, or by one thread.
  __device__ __forceinline__ std::uint32_t find(std::uint32_t row) const {
    return groups ? find_group_of_row(groups, row) : rows_of_matrix.divide(row);
  }
  __device__ __forceinline__ std::uint32_t at(std::uint32_t row) const {
    return groups ? group_of_row(groups, row) : rows_of_matrix.divide(row);
  }
};
inline Parts parts_of(const QuantizeArgs& args) {
  return {args.groups, Divisor(args.x.rows),
          args.groups ? args.groups.count : static_cast<std::uint32_t>(args.batch)};
}

template <class C>
constexpr bool kHasTensorScale = C::kRule == ScaleRule::kTensor || C::kRule == ScaleRule::kNvfp4;

// The part of the first vec16 of a block's run, and whether others lie in other parts.
struct FirstPart {
  std::uint32_t part;
  bool is_mixed;
};
// Finds it, by the whole warp, where a part has a scale; else the run is of part 0.
template <class C>
__device__ __forceinline__ FirstPart find_first_part(const VecRun& run, const Parts& parts,
                                                     std::uint32_t first) {
  if constexpr (!kHasTensorScale<C>) return {0, false};
  const std::uint32_t last = min(first + kRun, run.count) - 1;
  const std::uint32_t part = parts.find(run.vecs_of_row.divide(first));
  return {part, parts.find(run.vecs_of_row.divide(last)) != part};
}

// Returns the vec16s of all rows of x as one run.
inline VecRun run_of(const QuantizeArgs& args) {
  const std::int64_t of_row = args.x.cols / kVec, count = args.batch * args.x.rows * of_row;
  return {static_cast<const uint4*>(args.x.data),
          static_cast<std::uint32_t>(count),
          Divisor(of_row),
          args.x.rows_from,
          args.x.row_stride / (kVec / 2),
          args.x.last_row};
}
// Returns whether the rows of x are a run of whole blocks, and their scales those of one matrix.
inline bool is_run(const QuantizeArgs& args) {
  const KernelInput& x = args.x;
  const std::int64_t block = std::max({args.row_spec.block_cols, args.row_spec.transform, kVec});
  const bool has_gaps = !x.rows_from && ((x.rows > 1 && x.row_stride != x.cols) ||
                                         (args.batch > 1 && x.batch_stride != x.rows * x.cols));
  const bool pads_matrices = args.row.swizzled && args.batch > 1 && x.rows % kSwizzleTileRows != 0;
  return !has_gaps && !pads_matrices && !args.row.has_gaps && x.cols % block == 0 &&
         args.row.height_log2 == 0 &&
         args.batch * x.rows * x.cols / kVec < (std::int64_t{1} << 31) - kThreads * kVecsOfRows;
}

}  // namespace minifloat::cuda
