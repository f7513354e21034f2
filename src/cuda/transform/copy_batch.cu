// Many copies of bytes in one launch, and one more launch for bytes that are ORed.
//
//     16 KiB a block of threads, 16 bytes at a time where both ends are aligned alike
#include "cuda/backend.h"
#include "cuda/common/batch.cuh"

namespace minifloat::cuda {
namespace {

inline constexpr std::int64_t kCopyTile = 16 * 1024;

struct alignas(16) CopyEntry {
  const std::uint8_t* from;
  std::uint8_t* to;
  std::int64_t bytes;
  bool is_aligned;
};

__global__ void __launch_bounds__(kThreads)
    copy_tiles(const __grid_constant__ TableView<CopyEntry> table, bool is_or) {
  __shared__ CopyEntry entry;
  const std::int64_t first = find_entry(table, entry) * kCopyTile;
  const std::int64_t end = min(first + kCopyTile, entry.bytes);
  std::int64_t done = first;
  if (entry.is_aligned && !is_or) {
    constexpr int kTogether = kCopyTile / 16 / kThreads;
    const auto* from = reinterpret_cast<const uint4*>(entry.from + first);
    auto* to = reinterpret_cast<uint4*>(entry.to + first);
    const std::int64_t chunks = (end - first) / 16;
    uint4 chunk[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (threadIdx.x + i * kThreads < chunks) chunk[i] = __ldg(from + threadIdx.x + i * kThreads);
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (threadIdx.x + i * kThreads < chunks) to[threadIdx.x + i * kThreads] = chunk[i];
    done += chunks * 16;
  }
  for (std::int64_t i = done + threadIdx.x; i < end; i += kThreads)
    entry.to[i] = static_cast<std::uint8_t>(entry.from[i] | (is_or ? entry.to[i] : 0));
}

void launch(std::span<const Copy> copies, bool is_or, const Execution& execution) {
  Table<CopyEntry> table;
  for (const Copy& c : copies) {
    if (c.is_or != is_or) continue;
    const bool is_aligned = reinterpret_cast<std::uintptr_t>(c.from) % 16 == 0 &&
                            reinterpret_cast<std::uintptr_t>(c.to) % 16 == 0;
    table.add({c.from, c.to, c.bytes, is_aligned}, ceil_div(c.bytes, kCopyTile));
  }
  if (table.empty()) return;
  const Scratch scratch(round_up<std::size_t>(table.bytes(), 16), execution);
  const auto view = table.send_to(scratch.as<std::uint8_t>(), cuda_stream(execution));
  copy_tiles<<<table.grid("copy_many"), kThreads, 0, cuda_stream(execution)>>>(view, is_or);
  check_launch("copy_many");
}

}  // namespace

void copy_many(std::span<const Copy> copies, const Execution& execution) {
  launch(copies, false, execution);
  launch(copies, true, execution);
}

}  // namespace minifloat::cuda
