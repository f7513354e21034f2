// The division of a kernel's work over its grid, for the host and the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/common/kernel_input.h"
#include "cuda/common/launch.h"

namespace minifloat::cuda {

inline constexpr int kVec = 16;        // elements of a row, the run that one Philox call serves
inline constexpr int kThreads = 256;   // of a block
inline constexpr int kVecsOfRows = 4;  // vec16s of a thread, by rows
inline constexpr int kTile = 128;  // rows and columns: whole blocks and transforms of every kind

// The divisor of floor(n / d) for n < 2^31: (floor(n * m / 2^32) + n) >> s, with s = ceil(log2 d)
// and m = 2^32 (2^s - d) / d + 1 (Granlund and Montgomery, "Division by invariant integers using
// multiplication", PLDI 1994). An empty tensor's sizes are 0: d is 0, a grid of so many parts has
// no blocks, and divide(n) is n.
struct Divisor {
  std::uint32_t d = 1, m = 1, s = 0;

  Divisor() = default;
  explicit Divisor(std::int64_t divisor) : d(static_cast<std::uint32_t>(divisor)) {
    if (d == 0) return;
    while ((std::uint64_t{1} << s) < d) ++s;
    m = static_cast<std::uint32_t>((((std::uint64_t{1} << s) - d) << 32) / d + 1);
  }
#if defined(__CUDACC__)
  __device__ __forceinline__ std::uint32_t divide(std::uint32_t n) const {
    return (__umulhi(n, m) + n) >> s;
  }
#endif
};

// ---- By rows: vec16s in the order of memory, one a lane -----------------------------------------
// The rows of an operand in a launch, padded to whole groups of lanes that share a block or a
// transform.
struct RowVecs {
  Divisor vecs_of_row, rows_of_matrix;
  std::uint32_t first_row, end_row;  // of all
};

// Calls launch(layout, grid) for each launch that the rows of x take: one, except for more than
// 2^31 vec16s.
//   cols: of the operand, padding included; group: lanes; kVecsOfThread: vec16s of a thread
template <int kVecsOfThread = kVecsOfRows, class Launch>
void each_launch_of_rows(std::int64_t batch, const KernelInput& x, std::int64_t cols,
                         std::int64_t group, Launch launch) {
  constexpr std::int64_t kMostVecs = (std::int64_t{1} << 31) - 4 * kThreads * kVecsOfThread;
  const std::int64_t vecs = ceil_div(ceil_div<std::int64_t>(cols, kVec), group) * group;
  const std::int64_t rows = batch * x.rows, at_once = std::max<std::int64_t>(kMostVecs / vecs, 1);
  for (std::int64_t first = 0; first < rows; first += at_once) {
    const std::int64_t end = std::min(first + at_once, rows);
    const RowVecs layout = {Divisor(vecs), Divisor(x.rows), static_cast<std::uint32_t>(first),
                            static_cast<std::uint32_t>(end)};
    launch(layout, static_cast<unsigned>(
                       ceil_div<std::int64_t>((end - first) * vecs, kThreads * kVecsOfThread)));
  }
}

// ---- By tiles: those of a row of tiles one after the other --------------------------------------
struct Tiles {
  Divisor across, down;
};
inline Tiles tiles_of(const KernelInput& x) {
  return {Divisor(ceil_div<std::int64_t>(x.cols, kTile)),
          Divisor(ceil_div<std::int64_t>(x.rows, kTile))};
}
// The order of the tiles of groups in a launch. Rows that KernelInput::rows_from repeats are taken
// column by column: what tiles of one column read of them stays in the L2 cache.
struct TileOrder {
  Divisor of_line;  // tiles of a row, or of a column
  bool is_by_columns;
#if defined(__CUDACC__)
  struct Tile {
    std::uint32_t row, col;  // of tiles
  };
  __device__ __forceinline__ Tile tile(std::uint32_t i) const {
    const std::uint32_t line = of_line.divide(i), in_line = i - line * of_line.d;
    return is_by_columns ? Tile{in_line, line} : Tile{line, in_line};
  }
#endif
};
// down, across: the tiles of a column and of a row
inline TileOrder tile_order(const KernelInput& x, std::int64_t down, std::int64_t across) {
  const bool is_by_columns = x.rows_from != nullptr;
  return {Divisor(is_by_columns ? down : across), is_by_columns};
}
inline unsigned tile_grid(std::int64_t batch, const Tiles& tiles, const char* kernel) {
  return grid_of(batch * tiles.across.d * tiles.down.d, kernel);
}

// Allows a kernel more than 48 KiB of dynamic shared memory.
template <class Kernel>
void allow_shared(Kernel kernel, std::size_t bytes, const char* name) {
  if (bytes > 48 * 1024)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(bytes)),
          name);
}

// Returns the grid of a persistent kernel: the blocks that are resident at once, at most `most`.
// They loop over rows, whose number only the device knows.   shared: dynamic
template <class Kernel>
unsigned resident_grid(Kernel kernel, std::int64_t most, std::size_t shared, const char* name) {
  int device = 0, processors = 0, blocks = 0;
  check(cudaGetDevice(&device), name);
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), name);
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, shared), name);
  return grid_of(std::min<std::int64_t>(most, std::int64_t{processors} * std::max(blocks, 1)),
                 name);
}

}  // namespace minifloat::cuda
