// The Hadamard transform alone, the swizzled scale layout, and the transpose of packed codes.
#include "minifloat/transform.h"

#include <algorithm>
#include <cstring>

#include "backends.h"
#include "grouped.h"
#include "minifloat/core/swizzle.h"
#include "parallel.h"
#include "tile.h"

namespace minifloat::cpu {
namespace {

// Calls f(row, col, offset) for every scale of one matrix.
template <class F>
void for_each_scale(const ScaleMatrix& m, F f) {
  if (m.kind == ScaleGroups::kNone) {
    for (std::int64_t r = 0; r < m.rows; ++r)
      for (std::int64_t c = 0; c < m.cols; ++c) f(r, c, swizzled_offset(r, c, m.cols));
    return;
  }
  std::int64_t begin = 0, padded = 0;  // of the group, among rows or columns
  for (std::int64_t g = 0; g < m.groups; ++g) {
    const std::int64_t end = m.offsets[g];
    if (m.kind == ScaleGroups::kAlongM) {
      for (std::int64_t r = begin; r < end; ++r)
        for (std::int64_t c = 0; c < m.cols; ++c)
          f(r, c, swizzled_offset_group_m(padded, r - begin, c, m.cols));
      padded += round_up(end - begin, minifloat::kSwizzleTileRows);
    } else {
      for (std::int64_t r = 0; r < m.rows; ++r)
        for (std::int64_t c = begin; c < end; ++c)
          f(r, c, swizzled_offset_group_k(padded, r, c - begin, m.rows, end - begin));
      padded += round_up(end - begin, minifloat::kSwizzleTileCols);
    }
    begin = end;
  }
}

struct HadamardCall {
  const TensorRef& x;  // without groups
  int points;
  bool columnwise;
  HadamardSigns signs;
  std::uint16_t* out;  // (batch, rows as read, pitch)
};

// Transforms matrices, and writes `padded` columns of each row of `pitch`.
void transform_matrices(const HadamardCall& call, std::int64_t padded, std::int64_t pitch,
                        const Execution& execution) {
  const TensorRef& x = call.x;
  const std::int64_t rows = call.columnwise ? x.cols : x.rows,
                     cols = call.columnwise ? x.rows : x.cols;
  const std::int64_t down = ceil_div(rows, kTileRows), across = ceil_div(padded, kTileCols);
  parallel_for(execution, x.batch * down * across, x.batch * rows * padded, [&](std::int64_t i) {
    TileMemory memory;
    const std::int64_t batch = i / across / down;
    const std::int64_t row = i / across % down * kTileRows, col = i % across * kTileCols;
    const TileRange range = {batch, row, col, std::min(kTileRows, rows - row),
                             std::clamp<std::int64_t>(cols - col, 0, kTileCols)};
    const TileView<std::uint16_t> tile =
        load_bf16_tile({&x, call.columnwise, call.points, call.signs, &range, &memory});
    const std::int64_t inside = std::min(kTileCols, padded - col);
    for (std::int64_t r = 0; r < range.rows; ++r)
      std::memcpy(call.out + (batch * rows + row + r) * pitch + col, tile.row(r),
                  static_cast<std::size_t>(inside) * sizeof(std::uint16_t));
  });
}

}  // namespace

void hadamard(const TensorRef& x, int points, bool columnwise, std::uint32_t signs,
              std::uint16_t* out, const Execution& execution) {
  if (x.rows_from)
    return cpu::hadamard(GatheredRows(x).x(), points, columnwise, signs, out, execution);
  const HadamardCall call = {x, points, columnwise, repeated_signs(signs), out};
  if (!x.groups) {
    const std::int64_t cols = round_up<std::int64_t>(columnwise ? x.rows : x.cols, points);
    return transform_matrices(call, cols, cols, execution);
  }
  const std::int64_t unit = x.groups.unit,
                     pitch = columnwise ? grouped_cols<std::int64_t>(x.rows, unit, x.groups.count)
                                        : round_up<std::int64_t>(x.cols, points);
  each_group(x.groups, [&](const Group& group) {
    const TensorRef rows = rows_of(x, group);
    std::uint16_t* const to = out + (columnwise ? group.first_col : group.begin * pitch);
    transform_matrices({rows, points, columnwise, repeated_signs(signs), to},
                       columnwise ? group.cols : pitch, pitch, execution);
  });
}

void swizzle_scales(const ScaleMatrix& shape, const std::uint8_t* scale, std::uint8_t* out,
                    const Execution& execution) {
  const std::int64_t bytes = shape.swizzled_bytes(), count = shape.rows * shape.cols;
  parallel_for(execution, shape.batch, shape.batch * count, [&](std::int64_t e) {
    std::memset(out + e * bytes, 0, static_cast<std::size_t>(bytes));
    for_each_scale(shape, [&](std::int64_t r, std::int64_t c, std::int64_t offset) {
      out[e * bytes + offset] = scale[e * count + r * shape.cols + c];
    });
  });
}

void unswizzle_scales(const ScaleMatrix& shape, const std::uint8_t* swizzled, std::uint8_t* out,
                      const Execution& execution) {
  const std::int64_t bytes = shape.swizzled_bytes(), count = shape.rows * shape.cols;
  parallel_for(execution, shape.batch, shape.batch * count, [&](std::int64_t e) {
    for_each_scale(shape, [&](std::int64_t r, std::int64_t c, std::int64_t offset) {
      out[e * count + r * shape.cols + c] = swizzled[e * bytes + offset];
    });
  });
}

void transpose_nibbles(const CodeMatrix& matrix, std::uint8_t* out, const Execution& execution) {
  const std::int64_t batch = matrix.batch, rows = matrix.rows, cols = matrix.cols;
  const std::int64_t in_pitch = ceil_div<std::int64_t>(cols, 2),
                     out_pitch = ceil_div<std::int64_t>(rows, 2);
  // Output rows of a strip: a cache line of input bytes, half used twice.
  constexpr std::int64_t kCols = 64;
  const std::int64_t strips = ceil_div(cols, kCols);
  parallel_for(execution, batch * strips, batch * rows * cols, [&](std::int64_t i) {
    const std::uint8_t* in = matrix.codes + i / strips * rows * in_pitch;
    std::uint8_t* to = out + i / strips * cols * out_pitch;
    const std::int64_t first = i % strips * kCols, last = std::min(cols, first + kCols);
    for (std::int64_t r = 0; r < rows; r += 2)
      for (std::int64_t c = first; c < last; ++c) {
        const std::uint32_t low = nibble(in + r * in_pitch, c);
        const std::uint32_t high = r + 1 < rows ? nibble(in + (r + 1) * in_pitch, c) : 0;
        to[c * out_pitch + r / 2] = pack_nibbles(low, high);
      }
  });
}

}  // namespace minifloat::cpu
