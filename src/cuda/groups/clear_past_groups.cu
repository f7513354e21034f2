// Zeros in the rows past the last group. Blocks stride over them: where there are none, every block
// leaves at once.
#include "cuda/backend.h"
#include "cuda/common/launch.h"
#include "cuda/common/layout.h"

namespace minifloat::cuda {
namespace {

template <class Word>
__global__ void __launch_bounds__(kThreads)
    clear_past(const std::int32_t* ends, int groups, Word* rows, std::int64_t row_words,
               std::int64_t count) {
  const std::int64_t end = count * row_words, step = std::int64_t{gridDim.x} * kThreads;
  std::int64_t i = ends[groups] * row_words + std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (; i < end; i += step) rows[i] = Word{};
}

template <class Word>
void launch(const GroupTable& groups, void* rows, std::int64_t row_bytes, std::int64_t count,
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

void clear_past_groups(const GroupTable& groups, void* rows, std::int64_t row_bytes,
                       std::int64_t count, const Execution& execution) {
  const bool aligned = row_bytes % 16 == 0 && reinterpret_cast<std::uintptr_t>(rows) % 16 == 0;
  aligned ? launch<uint4>(groups, rows, row_bytes, count, execution)
          : launch<std::uint8_t>(groups, rows, row_bytes, count, execution);
}

}  // namespace minifloat::cuda
