// A tile of an operand as read, transformed: the input of amax and encoding. Its values are in fp32
// where x is and nothing transforms them, else in bf16, which holds them exactly.
//
//     x (R, C)            rowwise: tile row = row of x           columnwise: tile row = column of x
//     +----------+        values (kTileRows, pitch), zero past the operand's edge, so that the last
//     |  +---+   |        block is whole: its missing elements are zero, change no amax, and are
//     +--+---+---+        not stored
//
// A whole rowwise tile without a transform is read in place, without a copy.
#pragma once

#include <cstdint>

#include "lanes.h"
#include "minifloat/core/eden.h"
#include "minifloat/core/hadamard.h"
#include "minifloat/core/rounding.h"
#include "minifloat/quantize.h"
#include "targets.h"

namespace minifloat::cpu {

inline constexpr std::int64_t kTileRows = 128;
inline constexpr std::int64_t kTileCols = 128;  // a whole number of every block and every transform

// The place of a tile in its operand as read, and its size inside the operand.
struct TileRange {
  std::int64_t batch, row, col;
  std::int64_t rows, cols;  // inside the operand, before the transform's padding
  // The rows of a tile lie below one another, or, where blocks are one row high, one after the
  // other in one row of the operand, which then is read as one stream.
  bool is_strip = false;

  MINIFLOAT_INLINE std::int64_t row_of(std::int64_t r) const { return is_strip ? row : row + r; }
  MINIFLOAT_INLINE std::int64_t col_of(std::int64_t r) const {
    return is_strip ? col + r * kTileCols : col;
  }
};

// Rows of kTileCols values.
template <class T>
struct TileView {
  const T* values;
  std::int64_t pitch;
  // The elements from a row to the same row of the next tile; 0 where the tile is a copy.
  std::int64_t to_next = 0;
  MINIFLOAT_INLINE const T* row(std::int64_t r) const { return values + r * pitch; }
  // Prefetches row r of the next tile while row r is encoded. Past the end of x a prefetch has no
  // effect.
  MINIFLOAT_INLINE void prefetch(std::int64_t r) const {
    constexpr std::int64_t kLine = 64 / sizeof(T);
    if (to_next == 0) return;
    for (std::int64_t c = 0; c < kTileCols; c += kLine)
      __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(row(r)) +
                                                       (to_next + c) * sizeof(T)));
  }
};

struct TileMemory {
  alignas(64) float fp32[kTileRows * kTileCols];
  alignas(64) std::uint16_t bf16[kTileRows * kTileCols];
  MINIFLOAT_INLINE void get(float*& values) { values = fp32; }
  MINIFLOAT_INLINE void get(std::uint16_t*& values) { values = bf16; }
};

MINIFLOAT_INLINE float to_float(float x) { return x; }
MINIFLOAT_INLINE float to_float(std::uint16_t bf16) { return decode_bf16(bf16); }

// Loads a rowwise tile: a row of x is a row of the tile.
template <class T>
MINIFLOAT_INLINE TileView<T> load_rows(const T* x, std::int64_t stride, const TileRange& range,
                                       T* tile) {
  const T* corner = x + range.row * stride + range.col;
  const std::int64_t pitch = range.is_strip ? kTileCols : stride;
  if (range.cols == kTileCols)
    return {corner, pitch, range.is_strip ? range.rows * kTileCols : kTileCols};
  for (std::int64_t r = 0; r < range.rows; ++r) {
    T* out = tile + r * kTileCols;
    for (std::int64_t c = 0; c < range.cols; ++c) out[c] = corner[r * pitch + c];
    for (std::int64_t c = range.cols; c < kTileCols; ++c) out[c] = T{};
  }
  return {tile, kTileCols};
}

// Loads a columnwise tile: a column of x is a row of the tile.
template <class T>
MINIFLOAT_INLINE TileView<T> load_columns(const T* x, std::int64_t stride, const TileRange& range,
                                          T* tile) {
  // x's row is the tile's column. A tile past the last row has none.
  const T* corner = range.cols > 0 ? x + range.col * stride + range.row : nullptr;
  const std::int64_t whole_rows = range.rows / 16 * 16, whole_cols = range.cols / 16 * 16;
  for (std::int64_t c = 0; c < whole_cols; c += 16)
    for (std::int64_t r = 0; r < whole_rows; r += 16)
      transpose_16x16(corner + c * stride + r, stride, tile + r * kTileCols + c, kTileCols);
  for (std::int64_t r = 0; r < range.rows; ++r) {
    T* out = tile + r * kTileCols;
    const std::int64_t done = r < whole_rows ? whole_cols : 0;
    for (std::int64_t c = done; c < range.cols; ++c) out[c] = corner[c * stride + r];
    for (std::int64_t c = range.cols; c < kTileCols; ++c) out[c] = T{};
  }
  return {tile, kTileCols};
}

// Computes one stride of core/hadamard.h's butterflies, 16 points in a vector. Where i has the
// stride's bit the result is v[i - stride] - v[i], else v[i] + v[i + stride]. Both are the partner
// plus the element, with the element's sign flipped or not.
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

// Transforms one row of a tile. in may be out.   signs: (kTileCols / 16), the bits to flip
template <int Points, class T>
MINIFLOAT_INLINE void hadamard_row(const T* in, const LaneBits* signs, std::uint16_t* out) {
  constexpr int kVectors = Points / 16;
  alignas(64) float row[kTileCols];
  for (std::int64_t c = 0; c < kTileCols; ++c) row[c] = to_float(in[c]);
  Lanes* block = reinterpret_cast<Lanes*>(row);  // (kTileCols / 16)
  for (std::int64_t c = 0; c < kTileCols / 16; c += kVectors) {
    Lanes v[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      v[i] = reinterpret_cast<Lanes>(reinterpret_cast<LaneBits>(block[c + i]) ^ signs[c + i]);
      butterfly<1>(v[i]);
      butterfly<2>(v[i]);
      butterfly<4>(v[i]);
      butterfly<8>(v[i]);
    }
    butterflies<kVectors>(v);
    for (int i = 0; i < kVectors; ++i) block[c + i] = v[i];
  }
  for (std::int64_t c = 0; c < kTileCols; ++c)
    out[c] = static_cast<std::uint16_t>(encode_bf16(row[c] * hadamard_norm(Points)));
}

template <class T>
MINIFLOAT_INLINE TileView<std::uint16_t> transform_tile(const TileView<T>& in, std::int64_t rows,
                                                        int points, const HadamardSigns& of,
                                                        std::uint16_t* out) {
  LaneBits signs[kTileCols / 16];
  for (int i = 0; i < kTileCols / 16; ++i) {
    const std::uint32_t mask = of.of_16(i);
#define MINIFLOAT_SIGN(bit) (((mask >> (bit)) & 1u) << 31)
    signs[i] = LaneBits MINIFLOAT_LANES(MINIFLOAT_SIGN);
#undef MINIFLOAT_SIGN
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    if (points == 16) hadamard_row<16>(in.row(r), signs, out + r * kTileCols);
    if (points == 32) hadamard_row<32>(in.row(r), signs, out + r * kTileCols);
    if (points == 64) hadamard_row<64>(in.row(r), signs, out + r * kTileCols);
    if (points == 128) hadamard_row<128>(in.row(r), signs, out + r * kTileCols);
  }
  return {out, kTileCols};
}

// Returns the signs of a spec's transform.
inline HadamardSigns signs_of(const Spec& spec, const Random& random) {
  if (!spec.is_eden()) return repeated_signs(kHadamardSigns);
  return eden_signs(random_key(random.state, random.state_size, random.stream));
}

// The tile of x at `range`, as read, transformed where points > 0.
struct LoadArgs {
  const TensorRef* x;
  bool columnwise;
  int points;
  HadamardSigns signs;
  const TileRange* range;
  TileMemory* memory;
};

template <class T>
MINIFLOAT_INLINE TileView<T> load_as_read(const LoadArgs& args) {
  const T* matrix = static_cast<const T*>(args.x->data) + args.range->batch * args.x->batch_stride;
  T* tile = nullptr;
  args.memory->get(tile);
  return args.columnwise ? load_columns(matrix, args.x->row_stride, *args.range, tile)
                         : load_rows(matrix, args.x->row_stride, *args.range, tile);
}

template <class T>
struct LoadTile {
  MINIFLOAT_INLINE static TileView<T> run(const LoadArgs& args) { return load_as_read<T>(args); }
};
template <class T>
struct LoadTransformedTile {
  MINIFLOAT_INLINE static TileView<std::uint16_t> run(const LoadArgs& args) {
    return transform_tile(load_as_read<T>(args), args.range->rows, args.points, args.signs,
                          args.memory->bf16);
  }
};

inline TileView<float> load_fp32_tile(const LoadArgs& args) {
  return run_widest<LoadTile<float>>(args);
}
inline TileView<std::uint16_t> load_bf16_tile(const LoadArgs& args) {
  if (args.points == 0) return run_widest<LoadTile<std::uint16_t>>(args);
  if (args.x->dtype == DType::kFloat32) return run_widest<LoadTransformedTile<float>>(args);
  return run_widest<LoadTransformedTile<std::uint16_t>>(args);
}

}  // namespace minifloat::cpu
