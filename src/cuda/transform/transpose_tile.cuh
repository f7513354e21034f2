// The transpose of a tile through shared memory by a block of threads. Lanes take neighbouring
// groups of the tile's rows, so that a warp writes whole lines of the result:
//
//     4 bits    256 x 256 codes: a thread transposes 8 x 8 of them in registers
//     8 bits    256 x 256: a thread transposes 16 rows of 4 neighbours, 8 lanes 128 rows, a line
#pragma once

#include <cstdint>

#include "cuda/common/layout.h"
#include "cuda/common/nibbles.cuh"

namespace minifloat::cuda {

inline constexpr unsigned kNibbleRows = 256, kNibbleCols = 256, kNibbleWords = kNibbleCols / 8;
inline constexpr unsigned kByteRows = 256, kByteCols = 256, kByteChunks = kByteCols / 16;
inline constexpr unsigned kTransposeWords =
    kNibbleRows * kNibbleWords;  // of shared memory, for nibbles

// ---- 4 bits -------------------------------------------------------------------------------------
struct NibbleMatrix {
  const std::uint8_t* codes;  // (rows, in_pitch)
  std::uint8_t* out;          // (cols, out_pitch)
  std::int64_t rows, cols;
  std::int64_t in_pitch, out_pitch;  // bytes
  bool aligned_in, aligned_out;
};
__host__ __device__ inline NibbleMatrix nibble_matrix(const std::uint8_t* codes, std::uint8_t* out,
                                                      std::int64_t rows, std::int64_t cols) {
  NibbleMatrix m = {
      codes, out,  rows, cols, ceil_div<std::int64_t>(cols, 2), ceil_div<std::int64_t>(rows, 2),
      false, false};
  m.aligned_in = m.in_pitch % 16 == 0 && reinterpret_cast<std::uintptr_t>(codes) % 16 == 0;
  m.aligned_out = m.out_pitch % 4 == 0 && reinterpret_cast<std::uintptr_t>(out) % 4 == 0;
  return m;
}

// Loads up to 16 bytes, zero from `left` on.
__device__ __forceinline__ uint4 load_bytes(const std::uint8_t* from, int left) {
  uint4 w = {};
  std::uint32_t* to = &w.x;
#pragma unroll
  for (int k = 0; k < 16; ++k)
    if (k < left) to[k / 4] |= static_cast<std::uint32_t>(from[k]) << (k % 4 * 8);
  return w;
}

// Stores the first `left` of 16 bytes.
__device__ __forceinline__ void store_bytes(std::uint8_t* to, uint4 w, int left) {
#pragma unroll 1
  for (int k = 0; k < left; ++k) {
    to[k] = static_cast<std::uint8_t>(w.x);
    w.x = __funnelshift_r(w.x, w.y, 8), w.y = __funnelshift_r(w.y, w.z, 8);
    w.z = __funnelshift_r(w.z, w.w, 8), w.w >>= 8;
  }
}

// Returns the place of a word of nibbles. Lanes 8 rows apart read different banks.
__device__ __forceinline__ unsigned nibble_place(unsigned row, unsigned word) {
  return row * kNibbleWords + (word ^ (row / 8));
}
// Transposes the tile whose corner is (row, col).   words: (kTransposeWords)
__device__ __forceinline__ void transpose_nibble_tile(const NibbleMatrix& m, std::int64_t row,
                                                      std::int64_t col, std::uint32_t* words) {
  const std::uint8_t* in = m.codes + row * m.in_pitch + col / 2;
  const bool is_whole =
      m.aligned_in && m.aligned_out && row + kNibbleRows <= m.rows && col + kNibbleCols <= m.cols;

  // ---- Load, zero past the edges
  constexpr unsigned kChunks = kNibbleWords / 4, kStep = kThreads / kChunks;  // of 16 bytes
  const unsigned chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
  const std::uint8_t* from = in + first * m.in_pitch + chunk * 16;
  const auto keep = [&](unsigned r, const uint4& w) {
    words[nibble_place(r, 4 * chunk)] = w.x, words[nibble_place(r, 4 * chunk + 1)] = w.y;
    words[nibble_place(r, 4 * chunk + 2)] = w.z, words[nibble_place(r, 4 * chunk + 3)] = w.w;
  };
  if (is_whole) {
    uint4 w[kNibbleRows / kStep];
#pragma unroll
    for (unsigned i = 0; i < kNibbleRows / kStep; ++i)
      w[i] = __ldg(reinterpret_cast<const uint4*>(from + i * kStep * m.in_pitch));
#pragma unroll
    for (unsigned i = 0; i < kNibbleRows / kStep; ++i) keep(first + i * kStep, w[i]);
  } else {
    const int in_row = static_cast<int>(min(m.in_pitch - col / 2 - chunk * 16, std::int64_t{16}));
#pragma unroll 1
    for (unsigned r = first; r < kNibbleRows; r += kStep, from += kStep * m.in_pitch)
      keep(r, load_bytes(from, row + r < m.rows ? in_row : 0));
  }
  __syncthreads();

  // ---- Transpose, store
  const unsigned lane = threadIdx.x % 32;
  const std::int64_t byte = row / 2 + lane * 4;  // of a row of the result
  for (unsigned word = threadIdx.x / 32; word < kNibbleWords; word += kThreads / 32) {
    std::uint32_t a[8];
#pragma unroll
    for (unsigned i = 0; i < 8; ++i) a[i] = words[nibble_place(lane * 8 + i, word)];
    transpose_8x8(a);
    const std::int64_t c = col + word * 8;
    std::uint8_t* to = m.out + c * m.out_pitch + byte;
    if (is_whole) {
#pragma unroll
      for (int i = 0; i < 8; ++i, to += m.out_pitch) *reinterpret_cast<std::uint32_t*>(to) = a[i];
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i, to += m.out_pitch)
        for (int k = 0; k < 4; ++k)
          if (c + i < m.cols && byte + k < m.out_pitch)
            to[k] = static_cast<std::uint8_t>(a[i] >> (8 * k));
    }
  }
}

// ---- 8 bits -------------------------------------------------------------------------------------
struct ByteMatrix {
  const std::uint8_t* from;  // (rows, cols)
  std::uint8_t* to;          // (cols, rows)
  std::int64_t rows, cols;
  bool aligned;  // rows of both are whole chunks of 16 bytes, aligned
};
__host__ __device__ inline ByteMatrix byte_matrix(const std::uint8_t* from, std::uint8_t* to,
                                                  std::int64_t rows, std::int64_t cols) {
  const auto addresses =
      reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to);
  return {from, to, rows, cols, rows % 16 == 0 && cols % 16 == 0 && addresses % 16 == 0};
}
inline constexpr unsigned kLineRows = 128, kLineGroups = kLineRows / 16;  // of a line of the result
static_assert(kByteRows % kLineRows == 0 && kByteChunks % 8 == 0);

// Returns the place of a chunk: strip after strip, each 8 chunks wide. The 8 groups of a line read
// different banks.
__device__ __forceinline__ unsigned byte_chunk(unsigned row, unsigned chunk) {
  return (chunk / 8 * kByteRows + row) * 8 + ((chunk ^ (row / 16)) % 8);
}

// Loads the tile, zero past the edges.
__device__ __forceinline__ void load_byte_tile(const ByteMatrix& m, std::int64_t row,
                                               std::int64_t col, uint4* chunks) {
  constexpr unsigned kStep = kThreads / kByteChunks;  // rows at once
  const unsigned chunk = threadIdx.x % kByteChunks, first = threadIdx.x / kByteChunks;
  const std::uint8_t* from = m.from + (row + first) * m.cols + col + chunk * 16;
  const int in_row =
      static_cast<int>(max(min(m.cols - col - chunk * 16, std::int64_t{16}), std::int64_t{0}));
  const auto in_column = static_cast<unsigned>(min(m.rows - row, std::int64_t{kByteRows}));
  if (m.aligned) {
#pragma unroll
    for (unsigned i = 0; i < kByteRows / kStep; ++i, from += kStep * m.cols) {
      const int bytes = first + i * kStep < in_column ? in_row : 0;
      copy_async_16(chunks + byte_chunk(first + i * kStep, chunk), bytes > 0 ? from : m.from,
                    bytes);
    }
    wait_for_copies();
  } else {
#pragma unroll 1
    for (unsigned r = first; r < kByteRows; r += kStep, from += kStep * m.cols)
      chunks[byte_chunk(r, chunk)] = load_bytes(from, r < in_column ? in_row : 0);
  }
}

// Transposes 16 rows from `row` on of the 4 columns of `word`: 16 bytes of each column.
__device__ __forceinline__ void transpose_16x4(const std::uint32_t* words, unsigned row,
                                               unsigned word, uint4 (&out)[4]) {
  std::uint32_t transposed[4][4];  // (column, 4 rows each)
#pragma unroll
  for (unsigned q = 0; q < 4; ++q) {
    std::uint32_t w[4];
#pragma unroll
    for (unsigned i = 0; i < 4; ++i)
      w[i] = words[byte_chunk(row + 4 * q + i, word / 4) * 4 + word % 4];
    const std::uint32_t low01 = __byte_perm(w[0], w[1], 0x5140);
    const std::uint32_t low23 = __byte_perm(w[2], w[3], 0x5140);
    const std::uint32_t high01 = __byte_perm(w[0], w[1], 0x7362);
    const std::uint32_t high23 = __byte_perm(w[2], w[3], 0x7362);
    transposed[0][q] = __byte_perm(low01, low23, 0x5410);
    transposed[1][q] = __byte_perm(low01, low23, 0x7632);
    transposed[2][q] = __byte_perm(high01, high23, 0x5410);
    transposed[3][q] = __byte_perm(high01, high23, 0x7632);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    out[i] = make_uint4(transposed[i][0], transposed[i][1], transposed[i][2], transposed[i][3]);
}

// Transposes a tile of bytes.   words: (kByteRows * kByteCols / 4)
__device__ __forceinline__ void transpose_byte_tile(const ByteMatrix& m, std::int64_t row,
                                                    std::int64_t col, std::uint32_t* words) {
  load_byte_tile(m, row, col, reinterpret_cast<uint4*>(words));
  __syncthreads();
  const unsigned group = threadIdx.x % kLineGroups;
#pragma unroll
  for (unsigned word = threadIdx.x / kLineGroups; word < kByteCols / 4;
       word += kThreads / kLineGroups)
#pragma unroll
    for (unsigned line = 0; line < kByteRows / kLineRows; ++line) {
      const unsigned top = line * kLineRows + group * 16;
      uint4 out[4];
      transpose_16x4(words, top, word, out);
      const std::int64_t c = col + word * 4, r = row + top;
      std::uint8_t* to = m.to + c * m.rows + r;
#pragma unroll
      for (int i = 0; i < 4; ++i, to += m.rows) {
        if (r >= m.rows || c + i >= m.cols) continue;
        if (m.aligned)
          *reinterpret_cast<uint4*>(to) = out[i];
        else
          store_bytes(to, out[i], static_cast<int>(min(m.rows - r, std::int64_t{16})));
      }
    }
}

}  // namespace minifloat::cuda
