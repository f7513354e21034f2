// Vectors of 64 bytes, for the few steps that move values across lanes. The compiler splits them on
// a machine with shorter vectors.
#pragma once

#include <cstdint>

#include "targets.h"

namespace minifloat::cpu {

using Lanes = float __attribute__((vector_size(64), may_alias));               // 16
using LaneBits = std::uint32_t __attribute__((vector_size(64), may_alias));    // 16
using LaneHalves = std::uint16_t __attribute__((vector_size(64), may_alias));  // 32

// {F(0), …, F(15)}
#define MINIFLOAT_LANES(F)                              \
  {F(0), F(1), F(2),  F(3),  F(4),  F(5),  F(6),  F(7), \
   F(8), F(9), F(10), F(11), F(12), F(13), F(14), F(15)}

// The indices of lanes 0, 2, 4, … and of lanes 1, 3, 5, … of a and b, a's before b's.
#define MINIFLOAT_EVEN_16 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define MINIFLOAT_ODD_16 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define MINIFLOAT_EVEN_32 \
  MINIFLOAT_EVEN_16, 32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62
#define MINIFLOAT_ODD_32 \
  MINIFLOAT_ODD_16, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63

// Keeps the larger of each two neighbours.
MINIFLOAT_INLINE void halve(LaneBits& out, const LaneBits& a, const LaneBits& b) {
  const LaneBits even = __builtin_shufflevector(a, b, MINIFLOAT_EVEN_16);
  const LaneBits odd = __builtin_shufflevector(a, b, MINIFLOAT_ODD_16);
  out = even > odd ? even : odd;
}
MINIFLOAT_INLINE void halve(LaneHalves& out, const LaneHalves& a, const LaneHalves& b) {
  const LaneHalves even = __builtin_shufflevector(a, b, MINIFLOAT_EVEN_32);
  const LaneHalves odd = __builtin_shufflevector(a, b, MINIFLOAT_ODD_32);
  out = even > odd ? even : odd;
}
#undef MINIFLOAT_EVEN_16
#undef MINIFLOAT_ODD_16
#undef MINIFLOAT_EVEN_32
#undef MINIFLOAT_ODD_32

// The transpose of 16 rows of 16 values, in four rounds that interleave halves. Each round rotates
// an element's index bits by one: (row, col) -> (col, row).
template <class T>
struct RowOf;
template <>
struct RowOf<float> {
  using Type = float __attribute__((vector_size(64)));
};
template <>
struct RowOf<std::uint16_t> {
  using Type = std::uint16_t __attribute__((vector_size(32)));
};
template <class T>
MINIFLOAT_INLINE void transpose_16x16(const T* in, std::int64_t stride, T* out,
                                      std::int64_t pitch) {
  using Row = typename RowOf<T>::Type;
  Row v[16], w[16];
  for (int i = 0; i < 16; ++i) __builtin_memcpy(&v[i], in + i * stride, sizeof(Row));
#define MINIFLOAT_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define MINIFLOAT_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 8; ++i) {
      w[2 * i] = __builtin_shufflevector(v[i], v[i + 8], MINIFLOAT_LOW);
      w[2 * i + 1] = __builtin_shufflevector(v[i], v[i + 8], MINIFLOAT_HIGH);
    }
    for (int i = 0; i < 16; ++i) v[i] = w[i];
  }
#undef MINIFLOAT_LOW
#undef MINIFLOAT_HIGH
  for (int i = 0; i < 16; ++i) __builtin_memcpy(out + i * pitch, &v[i], sizeof(Row));
}

}  // namespace minifloat::cpu
