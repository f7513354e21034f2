// Block geometry: which elements share a scale, and where a 4-bit code lives in its byte.
//
//     operand as read (R, C), blocks of (r, c):   scales (ceil(R / r), ceil(C / c)), the last ones short
//     4-bit codes: element i of a row in byte i / 2, low nibble first; row pitch ceil(C / 2) bytes
#pragma once

#include <cstdint>

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

MINIFLOAT_HD constexpr std::uint8_t pack_nibbles(std::uint32_t low, std::uint32_t high) {
  return static_cast<std::uint8_t>((low & 0xFu) | (high << 4));
}
MINIFLOAT_HD constexpr std::uint32_t nibble(const std::uint8_t* row, std::int64_t i) {
  return (row[i / 2] >> (i % 2 * 4)) & 0xFu;
}

}  // namespace minifloat
