// Shard geometry: the flat range [start, end) of a row-major weight (N, K), cut as by ZeRO and
// FSDP.
//
//     K = 8, blocks 2 x 4, range [11, 21):          . . . .|. . . .   rows 1 and 2, block rows 0..1
//                                                   . . . x|x x x x   row 1, columns 3 to 7
//                                                   -------+-------
//                                                   x x x x|x . . .   row 2, columns 0 to 4
//
// A cut splits the blocks that have elements on both sides of it. The cut at 11 splits both upper
// blocks: row 0 lies before the cut, and the rest of row 1 behind it.
//
// 4-bit codes lie two a byte, row by row with pitch ceil(K / 2): at an even K, in byte flat / 2.
#pragma once

#include <cstdint>

#include "minifloat/core/block.h"
#include "minifloat/core/host_device.h"

namespace minifloat {

struct Span {  // [begin, end); empty where begin >= end
  std::int64_t begin = 0;
  std::int64_t end = 0;
  MINIFLOAT_HD constexpr bool empty() const { return begin >= end; }
  MINIFLOAT_HD constexpr std::int64_t size() const { return empty() ? 0 : end - begin; }
};

struct FlatShard {
  std::int64_t cols;  // K
  Span range;         // flat elements

  // Returns the rows that the range touches.
  MINIFLOAT_HD constexpr Span rows() const {
    if (range.empty()) return {};
    return {range.begin / cols, (range.end - 1) / cols + 1};
  }
  // Returns the part of row r that is inside.
  MINIFLOAT_HD constexpr Span cols_of_row(std::int64_t r) const {
    const std::int64_t first = r * cols;
    const std::int64_t begin = range.begin > first ? range.begin - first : 0;
    const std::int64_t end = range.end - first < cols ? range.end - first : cols;
    return begin < end ? Span{begin, end} : Span{};
  }
  // Returns the touched block rows, for blocks of `block_rows` rows.
  MINIFLOAT_HD constexpr Span block_rows(std::int64_t block_rows) const {
    const Span r = rows();
    if (r.empty()) return {};
    return {r.begin / block_rows, (r.end - 1) / block_rows + 1};
  }
  // Returns the bytes of the whole weight's codes, of `bits` bits each, that hold an element of the
  // range.
  MINIFLOAT_HD constexpr Span code_bytes(int bits) const {
    if (range.empty()) return {};
    if (bits == 8) return range;
    return {nibble_byte(range.begin), nibble_byte(range.end - 1) + 1};
  }
  MINIFLOAT_HD constexpr std::int64_t nibble_byte(std::int64_t flat) const {
    return flat / cols * ceil_div<std::int64_t>(cols, 2) + flat % cols / 2;
  }
  // Returns the bytes of row r's packed 4-bit codes that hold an element of the range.
  MINIFLOAT_HD constexpr Span nibble_bytes_of_row(std::int64_t r) const {
    const Span c = cols_of_row(r);
    if (c.empty()) return {};
    const std::int64_t first = r * ceil_div<std::int64_t>(cols, 2);
    return {first + c.begin / 2, first + (c.end - 1) / 2 + 1};
  }
  // Returns which nibbles of byte b (of the whole code buffer) are the range's: 0x0F low, 0xF0
  // high, 0xFF both.
  MINIFLOAT_HD constexpr std::uint8_t nibble_mask(std::int64_t b) const {
    const std::int64_t pitch = ceil_div<std::int64_t>(cols, 2);
    const Span c = cols_of_row(b / pitch);
    const std::int64_t low = b % pitch * 2, high = low + 1;
    const bool has_low = c.begin <= low && low < c.end;
    const bool has_high = c.begin <= high && high < c.end;
    return static_cast<std::uint8_t>((has_low ? 0x0F : 0) | (has_high ? 0xF0 : 0));
  }
};

// The blocks of shape (height, width) of a weight (rows, cols), which cuts may split.
struct WeightBlocks {
  std::int64_t rows, cols;
  std::int64_t height, width;

  // Returns whether a cut before element `flat` splits a block.
  MINIFLOAT_HD constexpr bool are_split(std::int64_t flat) const {
    if (flat <= 0 || flat >= rows * cols) return false;
    const std::int64_t r = flat / cols, c = flat % cols;
    if (r % height != 0) return true;
    return c != 0 && (c % width != 0 || (height > 1 && r + 1 < rows));
  }
  // Returns the flat range of a block of one row, or of a row of higher blocks, that holds every
  // block which a cut before element `flat` splits.
  MINIFLOAT_HD constexpr Span around(std::int64_t flat) const {
    const std::int64_t row = flat / cols / height * height;
    if (height > 1) return {row * cols, (row + height < rows ? row + height : rows) * cols};
    const std::int64_t col = flat % cols / width * width;
    return {row * cols + col, row * cols + (col + width < cols ? col + width : cols)};
  }
};

}  // namespace minifloat
