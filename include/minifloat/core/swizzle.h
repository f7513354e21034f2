// The scale layout that block-scaled tensor-core products read: tiles of 128 x 4 scales, 512 bytes
// each, row-major over tiles (cuBLAS documentation, "1D Block Scaling Factors Layout").
//
//     scale (r, c), C scale columns, T = ceil(C / 4) tiles a row:
//     offset = ((r / 128) * T + c / 4) * 512 + (r % 32) * 16 + ((r % 128) / 32) * 4 + c % 4
//
// Sizes are padded to whole tiles, and the padding is zero.
//   3D weights (E, N, K):  one dense buffer an expert.
//   groups along M:        rows of group g start at padded row P_g = sum over h < g of
//                          128 ceil(m_h / 128)
//   groups along K:        columns of group g start at Q_g = sum over h < g of 4 ceil(k_h / 4), and
//                          tiling restarts in each group: Q_g * (padded rows) + offset with C = k_g
#pragma once

#include <cstdint>

#include "minifloat/core/block.h"
#include "minifloat/core/host_device.h"

namespace minifloat {

inline constexpr std::int64_t kSwizzleTileRows = 128;
inline constexpr std::int64_t kSwizzleTileCols = 4;

MINIFLOAT_HD constexpr std::int64_t swizzled_offset(std::int64_t r, std::int64_t c,
                                                    std::int64_t cols) {
  const std::int64_t tile =
      r / kSwizzleTileRows * ceil_div(cols, kSwizzleTileCols) + c / kSwizzleTileCols;
  return tile * (kSwizzleTileRows * kSwizzleTileCols) + r % 32 * 16 +
         r % kSwizzleTileRows / 32 * 4 + c % kSwizzleTileCols;
}

// Return the offset of a scale among groups: r or c counts from the group's start, and `before` is
// P_g or Q_g.
MINIFLOAT_HD constexpr std::int64_t swizzled_offset_group_m(std::int64_t before, std::int64_t r,
                                                            std::int64_t c, std::int64_t cols) {
  return before * round_up(cols, kSwizzleTileCols) + swizzled_offset(r, c, cols);
}
MINIFLOAT_HD constexpr std::int64_t swizzled_offset_group_k(std::int64_t before, std::int64_t r,
                                                            std::int64_t c, std::int64_t rows,
                                                            std::int64_t group_cols) {
  return before * round_up(rows, kSwizzleTileRows) + swizzled_offset(r, c, group_cols);
}

// Returns the bytes of a dense (rows, cols) scale matrix.
MINIFLOAT_HD constexpr std::int64_t swizzled_size(std::int64_t rows, std::int64_t cols) {
  return round_up(rows, kSwizzleTileRows) * round_up(cols, kSwizzleTileCols);
}

// Return the bytes that hold `groups` groups of any sizes, computed without reading the sizes.
MINIFLOAT_HD constexpr std::int64_t swizzled_size_groups_m(std::int64_t rows, std::int64_t cols,
                                                           std::int64_t groups) {
  return (rows + kSwizzleTileRows * groups) * round_up(cols, kSwizzleTileCols);
}
MINIFLOAT_HD constexpr std::int64_t swizzled_size_groups_k(std::int64_t rows, std::int64_t cols,
                                                           std::int64_t groups) {
  return round_up(rows, kSwizzleTileRows) * (cols + kSwizzleTileCols * groups);
}

}  // namespace minifloat
