// A block of threads transposes a tile through shared memory. Lanes take neighbouring groups of the tile's rows, so that
// a warp writes whole lines of the result:
//
//     4 bits    256 x 256 codes: a thread turns 8 x 8 of them in registers
//     8 bits    128 x 256, in two halves: a thread turns 16 rows of 4 neighbours
#pragma once

#include <cstdint>

#include "layout.h"
#include "nibbles.cuh"

namespace minifloat::cuda {

inline constexpr unsigned kNibbleRows = 256, kNibbleCols = 256, kNibbleWords = kNibbleCols / 8;
inline constexpr unsigned kByteRows = 128, kByteCols = 256, kByteChunks = kByteCols / 16;
inline constexpr unsigned kTurnWords = kNibbleRows * kNibbleWords;  // of shared memory, for either

// ---- 4 bits --------------------------------------------------------------------------------------
struct NibbleMatrix {
  const std::uint8_t* codes;  // (rows, in_pitch)
  std::uint8_t* out;          // (cols, out_pitch)
  std::int64_t rows, cols;
  std::int64_t in_pitch, out_pitch;  // bytes
  bool aligned_in, aligned_out;
};
inline NibbleMatrix nibble_matrix(const std::uint8_t* codes, std::uint8_t* out, std::int64_t rows,
                                  std::int64_t cols) {
  NibbleMatrix m = {
      codes, out,  rows, cols, ceil_div<std::int64_t>(cols, 2), ceil_div<std::int64_t>(rows, 2),
      false, false};
  m.aligned_in = m.in_pitch % 16 == 0 && reinterpret_cast<std::uintptr_t>(codes) % 16 == 0;
  m.aligned_out = m.out_pitch % 4 == 0 && reinterpret_cast<std::uintptr_t>(out) % 4 == 0;
  return m;
}

// Up to 16 bytes, zero from `left` on.
__device__ __forceinline__ uint4 load_bytes(const std::uint8_t* from, int left) {
  uint4 w = {};
  std::uint32_t* to = &w.x;
#pragma unroll
  for (int k = 0; k < 16; ++k)
    if (k < left) to[k / 4] |= static_cast<std::uint32_t>(from[k]) << (k % 4 * 8);
  return w;
}

// Lanes 8 rows apart read different banks.
__device__ __forceinline__ unsigned nibble_place(unsigned row, unsigned word) {
  return row * kNibbleWords + (word ^ (row / 8));
}
// The tile whose corner is (row, col).   words: (kTurnWords)
__device__ __forceinline__ void turn_nibbles(const NibbleMatrix& m, std::int64_t row,
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

  // ---- Turn, store
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

// ---- 8 bits --------------------------------------------------------------------------------------
struct ByteMatrix {
  const std::uint8_t* from;  // (rows, cols)
  std::uint8_t* to;          // (cols, rows)
  std::int64_t rows, cols;
  bool aligned;  // rows of both start at multiples of 16 bytes
};
// Half after half, each 8 chunks wide. Groups of 16 rows read different banks.
__device__ __forceinline__ unsigned byte_chunk(unsigned row, unsigned chunk) {
  return (chunk / 8 * kByteRows + row) * 8 + (chunk % 8 ^ (row / 16));
}
// words: (kByteRows * kByteCols / 4) at least
__device__ __forceinline__ void turn_bytes(const ByteMatrix& m, std::int64_t row, std::int64_t col,
                                           std::uint32_t* words) {
  const bool is_whole = m.aligned && row + kByteRows <= m.rows && col + kByteCols <= m.cols;
  uint4* chunks = reinterpret_cast<uint4*>(words);

  // ---- Load, zero past the edges
  constexpr unsigned kStep = kThreads / kByteChunks;  // rows at once
  const unsigned chunk = threadIdx.x % kByteChunks, first = threadIdx.x / kByteChunks;
  const std::uint8_t* from = m.from + (row + first) * m.cols + col + chunk * 16;
  if (is_whole) {
#pragma unroll
    for (unsigned r = 0; r < kByteRows; r += kStep)
      chunks[byte_chunk(r + first, chunk)] =
          __ldg(reinterpret_cast<const uint4*>(from + r * m.cols));
  } else {
    const int in_row = static_cast<int>(min(m.cols - col - chunk * 16, std::int64_t{16}));
#pragma unroll 1
    for (unsigned r = first; r < kByteRows; r += kStep, from += kStep * m.cols)
      chunks[byte_chunk(r, chunk)] = load_bytes(from, row + r < m.rows ? in_row : 0);
  }
  __syncthreads();

  // ---- Turn 16 rows of a word, store 16 bytes in each of 4 rows of the result
  constexpr unsigned kGroups = kByteRows / 16;
  const unsigned group = threadIdx.x % kGroups;
#pragma unroll
  for (unsigned word = threadIdx.x / kGroups; word < kByteCols / 4; word += kThreads / kGroups) {
    std::uint32_t out[4][4];  // (column, 4 rows each)
#pragma unroll
    for (unsigned q = 0; q < 4; ++q) {
      std::uint32_t w[4];
#pragma unroll
      for (unsigned i = 0; i < 4; ++i)
        w[i] = words[byte_chunk(16 * group + 4 * q + i, word / 4) * 4 + word % 4];
      const std::uint32_t low01 = __byte_perm(w[0], w[1], 0x5140);
      const std::uint32_t low23 = __byte_perm(w[2], w[3], 0x5140);
      const std::uint32_t high01 = __byte_perm(w[0], w[1], 0x7362);
      const std::uint32_t high23 = __byte_perm(w[2], w[3], 0x7362);
      out[0][q] = __byte_perm(low01, low23, 0x5410), out[1][q] = __byte_perm(low01, low23, 0x7632);
      out[2][q] = __byte_perm(high01, high23, 0x5410);
      out[3][q] = __byte_perm(high01, high23, 0x7632);
    }
    const std::int64_t c = col + word * 4, r = row + group * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      std::uint8_t* to = m.to + (c + i) * m.rows + r;
      if (is_whole) {
        *reinterpret_cast<uint4*>(to) = make_uint4(out[i][0], out[i][1], out[i][2], out[i][3]);
      } else if (c + i < m.cols) {
#pragma unroll
        for (int k = 0; k < 16; ++k)
          if (r + k < m.rows) to[k] = static_cast<std::uint8_t>(out[i][k / 4] >> (k % 4 * 8));
      }
    }
  }
}

}  // namespace minifloat::cuda
