// The choice of scales under a rule that reads values (core/scale_rule.h), for the blocks of
// shards: a line of 16 elements a thread.
//
//     bytes an element: 2 or 4 of the master, and a block's amax twice
#include "cuda/backend.h"
#include "cuda/codec/block_error.cuh"
#include "cuda/common/batch.cuh"
#include "cuda/sharded/shard.cuh"

namespace minifloat::cuda {
namespace {

struct alignas(16) ChoiceEntry {
  ShardEntry shard;
  const float* following;  // null: no element that follows the shard is read
  bool rounds_following;   // to the compute dtype
};

// Returns whether blocks are 16 x 16, rather than 16 neighbours.
__host__ __device__ __forceinline__ bool is_2d(const ShardEntry& e) {
  return e.height_log2 > 0 && e.width_log2 > 0;
}

// Loads 16 neighbours along a row of W, or down a column, from (row, col) on; zero past the edges.
__device__ __forceinline__ Vec16<float> load_line(const ChoiceEntry& choice, std::uint32_t row,
                                                  std::uint32_t col, bool is_down) {
  const ShardEntry& e = choice.shard;
  Vec16<float> line = {};
#pragma unroll
  for (unsigned i = 0; i < kVec; ++i) {
    const std::uint32_t r = is_down ? row + i : row, c = is_down ? col : col + i;
    if (r >= e.rows || c >= e.cols) continue;
    const std::int64_t flat = std::int64_t{r} * e.cols + c;
    if (flat < e.end) {
      line.v[i] = load_element(e, flat - e.begin);
    } else {
      const float x = choice.following[flat - e.end];
      line.v[i] = choice.rounds_following ? round_to_bf16(x) : x;
    }
  }
  return line;
}

// Chooses the scales. A line is a block, or a row of a 2D block, whose 16 lines are neighbours in a
// warp.
__global__ void __launch_bounds__(kThreads)
    choose_scales_of_shards(const __grid_constant__ TableView<ChoiceEntry> table) {
  __shared__ ChoiceEntry choice;
  const ShardEntry& e = choice.shard;
  const std::uint32_t line = find_entry(table, choice) * kThreads + threadIdx.x;
  const std::uint32_t cell = is_2d(e) ? line / kVec : line;
  const bool is_there = cell < e.grid_rows * e.grid_cols;
  const std::uint32_t row = cell / e.grid_cols << e.height_log2,
                      col = cell % e.grid_cols << e.width_log2;
  const std::int64_t flat = std::int64_t{row} * e.cols + col;
  const bool is_here = is_there && e.begin <= flat && flat < e.end;
  const std::uint32_t amax = is_there ? e.amaxes[cell] : 0;
  Errors errors = {};
  if (is_here) {
    const std::uint32_t in_block = is_2d(e) ? line % kVec : 0;
    const Vec16<float> values = load_line(choice, row + in_block, col, e.width_log2 == 0);
    const MatrixScale matrix = scale_of_weight<E2M1>(e);
    errors = errors_of_vec(matrix, both_scales(e.rule, e.rounding, matrix, amax), values);
  }
  if (is_2d(e))
    for (int half = kVec / 2; half > 0; half /= 2) {
      errors.first = errors.first + __shfl_xor_sync(kAllLanes, errors.first, half);
      errors.second = errors.second + __shfl_xor_sync(kAllLanes, errors.second, half);
    }
  if (is_there && (!is_2d(e) || line % kVec == 0) && !takes_second(errors.first, errors.second))
    e.amaxes[cell] = amax | kSecondScale;
}

}  // namespace

void choose_scales(std::span<const PartialCast> casts, const Execution& execution) {
  Table<ChoiceEntry> table;
  for (const PartialCast& cast : casts) {
    const ShardEntry e = entry_of(cast);
    const AmaxGrid grid = amax_grid(cast.spec, cast.columnwise, cast.rows, cast.cols);
    const std::int64_t lines = grid.cells() * (is_2d(e) ? kVec : 1);
    table.add({e, cast.following, cast.compute == DType::kBFloat16},
              ceil_div<std::int64_t>(lines, kThreads));
  }
  launch_over(table, choose_scales_of_shards, "choose_scales", execution);
}

}  // namespace minifloat::cuda
