// The table of groups (core/groups.h), in one launch of one block: a thread a group. The ends are a
// prefix maximum, because each end is at least the one before, and the columns of all units are
// prefix sums of one exchange. And zeros in the rows past the last group: blocks stride over them,
// and where there are none, every block leaves at once.
#include <algorithm>

#include "cuda/backend.h"
#include "cuda/common/launch.h"
#include "cuda/common/layout.h"
#include "cuda/common/reduce.cuh"

namespace minifloat::cuda {
namespace {

struct Sums {
  std::int32_t of_unit[kGroupUnits];
};

// Returns the sums over the lanes up to this one.
__device__ __forceinline__ Sums warp_prefix_sums(Sums sums) {
#pragma unroll
  for (std::int32_t& sum : sums.of_unit) sum = warp_prefix_sum(sum);
  return sums;
}

//   offs: (groups)   table: (kGroupTableRows, groups + 1)
__global__ void write_group_table(const std::int32_t* offs, unsigned groups, std::int32_t rows,
                                  std::int32_t* table) {
  __shared__ std::int32_t end_of_warp[32];
  __shared__ Sums sums_of_warp[32];
  const unsigned e = threadIdx.x, lane = e % 32, warp = e / 32, warps = blockDim.x / 32;

  // ---- The ends
  std::int32_t end = warp_prefix_max(e < groups ? max(offs[e], 0) : 0);
  if (lane == 31) end_of_warp[warp] = end;
  __syncthreads();
  const std::int32_t largest = warp_prefix_max(lane < warps ? end_of_warp[lane] : 0);
  const std::int32_t before_warp = __shfl_sync(kAllLanes, largest, warp > 0 ? warp - 1 : 0);
  if (warp > 0) end = max(end, before_warp);
  end = min(end, rows);
  std::int32_t begin = __shfl_up_sync(kAllLanes, end, 1);
  if (lane == 0) begin = warp > 0 ? min(before_warp, rows) : 0;

  // ---- The columns under each unit
  Sums sums = {};
  if (e < groups) {
#pragma unroll
    for (int i = 0; i < kGroupUnits; ++i)
      sums.of_unit[i] = group_cols<std::int32_t>(end - begin, kSmallestUnit << i);
  }
  sums = warp_prefix_sums(sums);
  if (lane == 31) sums_of_warp[warp] = sums;
  __syncthreads();
  const Sums of_warps = warp_prefix_sums(lane < warps ? sums_of_warp[lane] : Sums{});
#pragma unroll
  for (int i = 0; i < kGroupUnits; ++i) {
    const std::int32_t before =
        __shfl_sync(kAllLanes, of_warps.of_unit[i], warp > 0 ? warp - 1 : 0);
    if (warp > 0) sums.of_unit[i] += before;
  }

  // ---- Store
  if (e < kGroupTableRows) table[e * (groups + 1)] = 0;
  if (e >= groups) return;
  table[e + 1] = end;
#pragma unroll
  for (int i = 0; i < kGroupUnits; ++i) table[(1 + i) * (groups + 1) + e + 1] = sums.of_unit[i];
}

// ---- Rows past the last group ------------------------------------------------------------------
template <class Word>
__global__ void __launch_bounds__(kThreads)
    clear_past(const std::int32_t* ends, int groups, Word* rows, std::int64_t row_words,
               std::int64_t count) {
  const std::int64_t end = count * row_words, step = std::int64_t{gridDim.x} * kThreads;
  std::int64_t i = ends[groups] * row_words + std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (; i < end; i += step) rows[i] = Word{};
}

template <class Word>
void launch_clear(const GroupTable& groups, void* rows, std::int64_t row_bytes, std::int64_t count,
                  const Execution& execution) {
  constexpr std::int64_t kBlocks = 264;  // two for each SM of an H200
  const std::int64_t row_words = row_bytes / static_cast<std::int64_t>(sizeof(Word));
  const std::int64_t blocks =
      std::min(kBlocks, ceil_div<std::int64_t>(count * row_words, kThreads));
  clear_past<<<static_cast<unsigned>(blocks), kThreads, 0, cuda_stream(execution)>>>(
      groups.of_rows(), groups.count, static_cast<Word*>(rows), row_words, count);
  check_launch("clear_past_groups");
}

}  // namespace

void build_group_table(const std::int32_t* offs, std::int64_t groups, std::int64_t rows,
                       std::int32_t* table, const Execution& execution) {
  const auto threads =
      static_cast<unsigned>(std::max<std::int64_t>(round_up<std::int64_t>(groups, 32), 32));
  write_group_table<<<1, threads, 0, cuda_stream(execution)>>>(
      offs, static_cast<unsigned>(groups), static_cast<std::int32_t>(rows), table);
  check_launch("group_table");
}

void clear_past_groups(const GroupTable& groups, void* rows, std::int64_t row_bytes,
                       std::int64_t count, const Execution& execution) {
  const bool aligned = row_bytes % 16 == 0 && reinterpret_cast<std::uintptr_t>(rows) % 16 == 0;
  aligned ? launch_clear<uint4>(groups, rows, row_bytes, count, execution)
          : launch_clear<std::uint8_t>(groups, rows, row_bytes, count, execution);
}

}  // namespace minifloat::cuda
