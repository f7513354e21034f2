// The transposes of many matrices of codes and scales: one launch for nibbles, one for other
// elements.
//
//     bytes an element: its size, read and written
//
// Tiles go down a band of tile rows, then to the next column. Blocks that run at once therefore
// write neighbouring parts of the same rows of the result, and read neighbouring parts of the
// matrix.
#include "cuda/backend.h"
#include "cuda/common/batch.cuh"
#include "cuda/transform/transpose_tile.cuh"

namespace minifloat::cuda {
namespace {

// The height of a band of bytes. 4-bit codes are transposed one row of tiles after the other.
constexpr std::uint32_t kBandRows = 1024;
constexpr std::size_t kByteTile = kByteRows * kByteCols;
constexpr int kByteBlocks = kByteTile > 32 * 1024 ? 3 : 5;  // minimum blocks per SM

struct alignas(16) TransposeEntry {
  const std::uint8_t* from;
  std::uint8_t* to;
  std::uint32_t rows, cols;
  int bits;
};

struct TileCorner {
  std::int64_t row, col;
};
// Returns the corner of a tile.   band: the tiles of a band's height
__device__ __forceinline__ TileCorner corner_of(const TransposeEntry& e, std::uint32_t tile,
                                                std::uint32_t height, std::uint32_t width,
                                                std::uint32_t band) {
  const std::uint32_t down = ceil_div(e.rows, height), across = ceil_div(e.cols, width);
  const std::uint32_t first = tile / (band * across) * band, in_band = tile - first * across;
  const std::uint32_t here = min(band, down - first);  // the last band may be lower
  return {std::int64_t{first + in_band % here} * height, std::int64_t{in_band / here} * width};
}

// Transposes fp32 scales of blocks. They are few, so that loads are not staged.
__device__ __forceinline__ void transpose_words(const TransposeEntry& e, const TileCorner& at) {
  const auto* from = reinterpret_cast<const std::uint32_t*>(e.from);
  auto* to = reinterpret_cast<std::uint32_t*>(e.to);
  const auto rows = static_cast<unsigned>(min(e.rows - at.row, std::int64_t{kByteRows}));
  const auto cols = static_cast<unsigned>(min(e.cols - at.col, std::int64_t{kByteCols}));
  for (unsigned r = threadIdx.x / 32; r < rows; r += kThreads / 32)
    for (unsigned c = threadIdx.x % 32; c < cols; c += 32)
      to[(at.col + c) * e.rows + at.row + r] = from[(at.row + r) * e.cols + at.col + c];
}

__global__ void __launch_bounds__(kThreads, 5)
    transpose_nibble_tiles(const __grid_constant__ TableView<TransposeEntry> table) {
  __shared__ TransposeEntry e;
  __shared__ __align__(16) std::uint32_t words[kTransposeWords];
  const TileCorner at = corner_of(e, find_entry(table, e), kNibbleRows, kNibbleCols, 1);
  transpose_nibble_tile(nibble_matrix(e.from, e.to, e.rows, e.cols), at.row, at.col, words);
}

__global__ void __launch_bounds__(kThreads, kByteBlocks)
    transpose_byte_tiles(const __grid_constant__ TableView<TransposeEntry> table) {
  extern __shared__ __align__(16) std::uint32_t words[];
  __shared__ TransposeEntry e;
  const std::uint32_t tile = find_entry(table, e);
  const TileCorner at = corner_of(e, tile, kByteRows, kByteCols, kBandRows / kByteRows);
  if (e.bits == 8)
    transpose_byte_tile(byte_matrix(e.from, e.to, e.rows, e.cols), at.row, at.col, words);
  else
    transpose_words(e, at);
}

void add(Table<TransposeEntry>& table, const Transpose& m, unsigned height, unsigned width) {
  MINIFLOAT_CHECK(m.rows < (std::int64_t{1} << 31) && m.cols < (std::int64_t{1} << 31),
                  "transpose_many: expected less than 2^31 rows and columns, got ", m.rows, " x ",
                  m.cols);
  table.add({static_cast<const std::uint8_t*>(m.from), static_cast<std::uint8_t*>(m.to),
             static_cast<std::uint32_t>(m.rows), static_cast<std::uint32_t>(m.cols), m.bits},
            ceil_div<std::int64_t>(m.rows, height) * ceil_div<std::int64_t>(m.cols, width));
}

}  // namespace

void transpose_many(std::span<const Transpose> matrices, const Execution& execution) {
  Table<TransposeEntry> nibbles, bytes;
  for (const Transpose& m : matrices)
    m.bits == 4 ? add(nibbles, m, kNibbleRows, kNibbleCols) : add(bytes, m, kByteRows, kByteCols);
  launch_over(nibbles, transpose_nibble_tiles, "transpose_many", execution);
  launch_over(bytes, transpose_byte_tiles, "transpose_many", execution, kByteTile);
}

}  // namespace minifloat::cuda
