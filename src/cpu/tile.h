// A tile of an operand as read, in fp32, transformed: what amax and encoding look at.
//
//     x (R, C)            rowwise: tile row = row of x           columnwise: tile row = column of x
//     +----------+        values (kTileRows, pitch), zero past the operand's edge, so that the last block is
//     |  +---+   |        a whole one whose missing elements are zero: they change no amax, and are not stored
//     +--+---+---+
#pragma once

#include <cstdint>

#include "minifloat/core/hadamard.h"
#include "minifloat/core/rounding.h"
#include "minifloat/tensor_ref.h"
#include "targets.h"

namespace minifloat::cpu {

inline constexpr std::int64_t kTileRows = 128;
inline constexpr std::int64_t kTileCols = 128;  // a whole number of every block and every transform

// Where a tile lies in its operand as read, and how much of it is inside.
struct TileRange {
  std::int64_t batch, row, col;
  std::int64_t rows, cols;  // inside the operand, before the transform's padding
};

struct Tile {
  alignas(64) float values[kTileRows * kTileCols];
  MINIFLOAT_INLINE float* row(std::int64_t r) { return values + r * kTileCols; }
};

MINIFLOAT_INLINE float to_float(float x) { return x; }
MINIFLOAT_INLINE float to_float(std::uint16_t bf16) { return decode_bf16(bf16); }

// Rowwise: a row of x is a row of the tile.
template <class T>
MINIFLOAT_INLINE void load_rows(const T* x, std::int64_t stride, const TileRange& range,
                                Tile& tile) {
  for (std::int64_t r = 0; r < range.rows; ++r) {
    const T* in = x + (range.row + r) * stride + range.col;  // (range.cols)
    float* out = tile.row(r);
    for (std::int64_t c = 0; c < range.cols; ++c) out[c] = to_float(in[c]);
    for (std::int64_t c = range.cols; c < kTileCols; ++c) out[c] = 0.0f;
  }
}

// 16 lanes; the compiler splits them where the machine's vectors are shorter.
using Lanes = float __attribute__((vector_size(64), may_alias));
using LaneBits = std::uint32_t __attribute__((vector_size(64), may_alias));

// 16 rows of x, 16 columns each, to 16 rows of the tile: four rounds that interleave halves.
template <class T>
MINIFLOAT_INLINE void transpose_16x16(const T* x, std::int64_t stride, float* out) {
  Lanes v[16], w[16];
  for (int i = 0; i < 16; ++i) {
    float row[16];
    for (int j = 0; j < 16; ++j) row[j] = to_float(x[i * stride + j]);
    __builtin_memcpy(&v[i], row, sizeof(row));
  }
#define MINIFLOAT_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define MINIFLOAT_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
  for (int round = 0; round < 4;
       ++round) {  // element index bits rotate by one: (row, col) -> (col, row)
    for (int i = 0; i < 8; ++i) {
      w[2 * i] = __builtin_shufflevector(v[i], v[i + 8], MINIFLOAT_LOW);
      w[2 * i + 1] = __builtin_shufflevector(v[i], v[i + 8], MINIFLOAT_HIGH);
    }
    for (int i = 0; i < 16; ++i) v[i] = w[i];
  }
#undef MINIFLOAT_LOW
#undef MINIFLOAT_HIGH
  for (int i = 0; i < 16; ++i) __builtin_memcpy(out + i * kTileCols, &v[i], sizeof(v[i]));
}

// Columnwise: a column of x is a row of the tile.
template <class T>
MINIFLOAT_INLINE void load_columns(const T* x, std::int64_t stride, const TileRange& range,
                                   Tile& tile) {
  const T* corner = x + range.col * stride + range.row;  // x's row is the tile's column
  const std::int64_t whole_rows = range.rows / 16 * 16, whole_cols = range.cols / 16 * 16;
  for (std::int64_t c = 0; c < whole_cols; c += 16)
    for (std::int64_t r = 0; r < whole_rows; r += 16)
      transpose_16x16(corner + c * stride + r, stride, tile.row(r) + c);
  for (std::int64_t r = 0; r < range.rows; ++r) {
    float* out = tile.row(r);
    const std::int64_t done = r < whole_rows ? whole_cols : 0;
    for (std::int64_t c = done; c < range.cols; ++c) out[c] = to_float(corner[c * stride + r]);
    for (std::int64_t c = range.cols; c < kTileCols; ++c) out[c] = 0.0f;
  }
}

// core/hadamard.h's butterflies, 16 points in a vector: where i has the stride's bit the result is v[i - stride]
// - v[i], else v[i] + v[i + stride]; either is (partner) + (own value with the sign flipped or not).
#define MINIFLOAT_LANES(F)                              \
  {F(0), F(1), F(2),  F(3),  F(4),  F(5),  F(6),  F(7), \
   F(8), F(9), F(10), F(11), F(12), F(13), F(14), F(15)}

template <int Stride>
MINIFLOAT_INLINE void butterfly(Lanes& v) {
#define MINIFLOAT_FLIP(i) ((i) & Stride ? 0x8000'0000u : 0u)
  constexpr LaneBits kFlip = MINIFLOAT_LANES(MINIFLOAT_FLIP);
#undef MINIFLOAT_FLIP
  const Lanes partner = __builtin_shufflevector(
      v, v, 0 ^ Stride, 1 ^ Stride, 2 ^ Stride, 3 ^ Stride, 4 ^ Stride, 5 ^ Stride, 6 ^ Stride,
      7 ^ Stride, 8 ^ Stride, 9 ^ Stride, 10 ^ Stride, 11 ^ Stride, 12 ^ Stride, 13 ^ Stride,
      14 ^ Stride, 15 ^ Stride);
  v = partner + reinterpret_cast<Lanes>(reinterpret_cast<LaneBits>(v) ^ kFlip);
}

// One row of a tile.
template <int Points>
MINIFLOAT_INLINE void hadamard_row(float* row, const LaneBits& signs) {
  constexpr int kVectors = Points / 16;
  Lanes* block = reinterpret_cast<Lanes*>(row);  // (kTileCols / 16)
  for (std::int64_t c = 0; c < kTileCols / 16; c += kVectors) {
    Lanes v[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      v[i] = reinterpret_cast<Lanes>(reinterpret_cast<LaneBits>(block[c + i]) ^ signs);
      butterfly<1>(v[i]);
      butterfly<2>(v[i]);
      butterfly<4>(v[i]);
      butterfly<8>(v[i]);
    }
    for (int stride = 1; stride < kVectors; stride *= 2)
      for (int i = 0; i < kVectors; ++i)
        if (!(i & stride)) {
          const Lanes a = v[i], b = v[i + stride];
          v[i] = a + b;
          v[i + stride] = a - b;
        }
    for (int i = 0; i < kVectors; ++i) block[c + i] = v[i];
  }
  for (std::int64_t c = 0; c < kTileCols; ++c)
    row[c] = round_to_bf16(row[c] * hadamard_norm(Points));
}

MINIFLOAT_INLINE void transform_tile(Tile& tile, std::int64_t rows, int points,
                                     std::uint32_t mask) {
#define MINIFLOAT_SIGN(i) (((mask >> (i)) & 1u) << 31)
  const LaneBits signs = MINIFLOAT_LANES(MINIFLOAT_SIGN);
#undef MINIFLOAT_SIGN
  for (std::int64_t r = 0; r < rows; ++r) {
    if (points == 16) hadamard_row<16>(tile.row(r), signs);
    if (points == 32) hadamard_row<32>(tile.row(r), signs);
    if (points == 64) hadamard_row<64>(tile.row(r), signs);
    if (points == 128) hadamard_row<128>(tile.row(r), signs);
  }
}
#undef MINIFLOAT_LANES

// The tile of x at `range`, as read, transformed where points > 0.
template <class T>
MINIFLOAT_INLINE void load_tile(const TensorRef& x, bool columnwise, int points,
                                std::uint32_t signs, const TileRange& range, Tile& tile) {
  const T* matrix = static_cast<const T*>(x.data) + range.batch * x.batch_stride;
  if (columnwise)
    load_columns(matrix, x.row_stride, range, tile);
  else
    load_rows(matrix, x.row_stride, range, tile);
  if (points > 0) transform_tile(tile, range.rows, points, signs);
}

}  // namespace minifloat::cpu
