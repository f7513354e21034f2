// Matrices of codes and scales transposed, any number of them in one launch.
//
//     bytes an element: its own, read and written
#include "backend.h"
#include "many.cuh"
#include "turn.cuh"

namespace minifloat::cuda {
namespace {

struct alignas(16) TurnEntry {
  NibbleMatrix nibbles;  // of 4 bits
  ByteMatrix bytes;      // of 8; of 32, counted in words
  std::uint32_t across;  // tiles
  int bits;
};

// fp32 scales of blocks: few, so that a thread takes what it finds.
__device__ __forceinline__ void turn_words(const ByteMatrix& m, std::int64_t row,
                                           std::int64_t col) {
  const auto* from = reinterpret_cast<const std::uint32_t*>(m.from);
  auto* to = reinterpret_cast<std::uint32_t*>(m.to);
  for (unsigned i = threadIdx.x; i < kByteRows * kByteCols; i += kThreads) {
    const std::int64_t r = row + i / kByteCols, c = col + i % kByteCols;
    if (r < m.rows && c < m.cols) to[c * m.rows + r] = from[r * m.cols + c];
  }
}

__global__ void __launch_bounds__(kThreads, 5)
    transpose_tiles(const __grid_constant__ TableView<TurnEntry> table) {
  __shared__ TurnEntry entry;
  __shared__ __align__(16) std::uint32_t words[kTurnWords];
  const std::uint32_t tile = find_entry(table, entry);
  const std::int64_t down = tile / entry.across, along = tile % entry.across;
  if (entry.bits == 4)
    return turn_nibbles(entry.nibbles, down * kNibbleRows, along * kNibbleCols, words);
  if (entry.bits == 8) return turn_bytes(entry.bytes, down * kByteRows, along * kByteCols, words);
  turn_words(entry.bytes, down * kByteRows, along * kByteCols);
}

}  // namespace

void transpose_many(std::span<const Transpose> matrices, const Execution& execution) {
  Table<TurnEntry> table;
  for (const Transpose& m : matrices) {
    const auto* from = static_cast<const std::uint8_t*>(m.from);
    auto* to = static_cast<std::uint8_t*>(m.to);
    const bool aligned = m.rows % 16 == 0 && m.cols % 16 == 0 &&
                         reinterpret_cast<std::uintptr_t>(from) % 16 == 0 &&
                         reinterpret_cast<std::uintptr_t>(to) % 16 == 0;
    const std::int64_t height = m.bits == 4 ? kNibbleRows : kByteRows;
    const std::int64_t width = m.bits == 4 ? kNibbleCols : kByteCols;
    const std::int64_t across = ceil_div(m.cols, width);
    table.add({nibble_matrix(from, to, m.rows, m.cols),
               {from, to, m.rows, m.cols, aligned},
               static_cast<std::uint32_t>(across),
               m.bits},
              across * ceil_div(m.rows, height));
  }
  if (table.empty()) return;
  const Scratch scratch(round_up<std::size_t>(table.bytes(), 16), execution);
  const auto view = table.send_to(scratch.as<std::uint8_t>(), stream_of(execution));
  transpose_tiles<<<table.grid("transpose_many"), kThreads, 0, stream_of(execution)>>>(view);
  check_launch("transpose_many");
}

}  // namespace minifloat::cuda
