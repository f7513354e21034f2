// Block geometry: which elements share a scale, and where a 4-bit code lives in its byte.
//
//     operand as read (R, C), blocks of (r, c):   scales (ceil(R / r), ceil(C / c)), the last short
//     4-bit codes: element i of a row in byte i / 2, low nibble first; row pitch ceil(C / 2) bytes
#pragma once

#include <cstdint>
#include <initializer_list>

#include "minifloat/core/host_device.h"

namespace minifloat {

template <class Int>
MINIFLOAT_HD constexpr Int ceil_div(Int a, Int b) {
  return (a + b - 1) / b;
}
template <class Int>
MINIFLOAT_HD constexpr Int round_up(Int a, Int multiple) {
  return ceil_div(a, multiple) * multiple;
}

// Returns whether a 64-bit machine can address memory of these sizes: each is 0 to 2^48, and so is
// their product, with a 0 counted as 1. Counts of bytes, blocks and padded sizes then fit in 64
// bits.
template <class Sizes>
constexpr bool is_addressable(const Sizes& sizes) {
  constexpr std::int64_t kMost = std::int64_t{1} << 48;
  std::int64_t product = 1;
  for (const std::int64_t n : sizes) {
    if (n < 0 || n > kMost) return false;
    if (n == 0) continue;
    if (product > kMost / n) return false;
    product *= n;
  }
  return true;
}
constexpr bool is_addressable(std::initializer_list<std::int64_t> sizes) {
  return is_addressable<std::initializer_list<std::int64_t>>(sizes);
}

MINIFLOAT_HD constexpr std::uint8_t pack_nibbles(std::uint32_t low, std::uint32_t high) {
  return static_cast<std::uint8_t>((low & 0xFu) | (high << 4));
}
MINIFLOAT_HD constexpr std::uint32_t nibble(const std::uint8_t* row, std::int64_t i) {
  return (row[i / 2] >> (i % 2 * 4)) & 0xFu;
}

}  // namespace minifloat
