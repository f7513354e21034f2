// The distribution of an operand's elements over threads. A vec16 is 16 neighbours of a row of the
// operand as read, the run of one Philox call. A thread processes one vec16 at a time.
//
//     by rows      vec16s in the order of memory, one a lane: neighbours in a row are neighbours in
//                  a warp
//
//     by tiles     128 x 128 of x through shared memory, 4 vec16s a thread, a vec16 column a lane
//                  of 8:
//
//         untransposed   a vec16 is 32 (bf16) or 64 (fp32) bytes of a row of x
//         transposed     a vec16 is 16 elements of a column of x
//
//     A row's 16-byte chunks are stored at chunk ^ chunk / 8 ^ row / 16, so that the 8 vec16
//     columns of a warp read different banks, either way.
#pragma once

#include <cstdint>

#include "cuda/common/kernel_input.h"
#include "cuda/common/layout.h"
#include "cuda/common/ptx.cuh"
#include "minifloat/core/hadamard.h"
#include "minifloat/core/rounding.h"
#include "minifloat/core/scaling.h"

namespace minifloat::cuda {

inline constexpr int kVecColumnsLog2 = 3;
inline constexpr int kVecColumns = 1 << kVecColumnsLog2;
static_assert(kVecColumns * kVec == kTile);
inline constexpr std::uint32_t kAllLanes = 0xFFFF'FFFFu;

using Bf16 = std::uint16_t;  // the bits

// ---- Vec16s -------------------------------------------------------------------------------------
template <class T>
struct Vec16;
template <>
struct Vec16<float> {
  alignas(16) float v[kVec];
  __device__ __forceinline__ float operator[](int i) const { return v[i]; }
  __device__ __forceinline__ void set(int i, float x) { v[i] = x; }
  // Returns the bits of the largest magnitude; above infinity's where one element is NaN.
  __device__ __forceinline__ std::uint32_t amax() const {
    std::uint32_t m = 0;
#pragma unroll
    for (int i = 0; i < kVec; ++i) m = max(m, magnitude_bits(v[i]));
    return m;
  }
};
template <>
struct Vec16<Bf16> {
  alignas(16) std::uint32_t w[kVec / 2];  // pairs, the first in the lower half
  __device__ __forceinline__ float operator[](int i) const {
    return bit_cast<float>(i % 2 ? w[i / 2] & 0xFFFF'0000u : w[i / 2] << 16);
  }
  __device__ __forceinline__ void set(int i, Bf16 x) {  // once each, from zero
    w[i / 2] |= static_cast<std::uint32_t>(x) << (i % 2 * 16);
  }
  __device__ __forceinline__ Bf16 bits(int i) const {
    return static_cast<Bf16>(w[i / 2] >> (i % 2 * 16));
  }
  __device__ __forceinline__ std::uint32_t amax() const {
    std::uint32_t m =
        max_magnitude_bf16x2(max_magnitude_bf16x2(w[0], w[1]), max_magnitude_bf16x2(w[2], w[3]));
    m = max_magnitude_bf16x2(m, max_magnitude_bf16x2(max_magnitude_bf16x2(w[4], w[5]),
                                                     max_magnitude_bf16x2(w[6], w[7])));
    return max(m & 0x7FFF'0000u, (m << 16) & Float32::kMagnitude);
  }
};

// The position of a vec16 in the operand as read.
struct Place {
  std::uint32_t batch;  // the matrix, or the group
  std::uint32_t row;    // of its matrix
  std::uint32_t all;    // row of all matrices
  std::uint32_t col;
  std::uint32_t line;  // row of the operand's buffers: `all`, except along groups' contraction
};

// Returns row `row` of the memory of a matrix of x.
template <class T>
__device__ __forceinline__ const T* row_at(const KernelInput& x, std::uint32_t batch,
                                           std::uint32_t row) {
  return static_cast<const T*>(x.data) + batch * x.batch_stride + row * x.row_stride;
}
// Returns the row at x.data of row `row`: the last one where rows_from names none that is there.
__device__ __forceinline__ std::uint32_t row_from(const KernelInput& x, std::uint32_t row) {
  return min(static_cast<std::uint32_t>(__ldg(x.rows_from + row)), x.last_row);
}
// Returns row `row` of a matrix of x.
template <class T>
__device__ __forceinline__ const T* row_of(const KernelInput& x, std::uint32_t batch,
                                           std::uint32_t row) {
  if (x.rows_from) row = row_from(x, row);
  return row_at<T>(x, batch, row);
}

// Loads 16 elements, aligned to 16 bytes.
template <class T>
__device__ __forceinline__ Vec16<T> load_vec(const T* from) {
  Vec16<T> vec;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(vec) / sizeof(uint4)); ++i)
    reinterpret_cast<uint4*>(&vec)[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
  return vec;
}
// Loads 16 elements from `col` on; zero past the end of the row.
template <class T>
__device__ __forceinline__ Vec16<T> load_vec(const KernelInput& x, const T* row,
                                             std::uint32_t col) {
  if (x.aligned && col + kVec <= x.cols) return load_vec(row + col);
  Vec16<T> vec = {};
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    if (col + i < x.cols) vec.set(i, row[col + i]);
  return vec;
}

// ---- By rows ------------------------------------------------------------------------------------
__device__ __forceinline__ Place vec_place(const RowVecs& layout, std::uint32_t u) {
  Place at;
  const std::uint32_t row = layout.vecs_of_row.divide(u);
  at.col = (u - row * layout.vecs_of_row.d) * kVec;
  at.all = layout.first_row + row;
  at.batch = layout.rows_of_matrix.divide(at.all);
  at.row = at.all - at.batch * layout.rows_of_matrix.d;
  at.line = at.all;
  return at;
}

// Calls body(vec16, place) for the thread's vec16s, one after the other, with the next load in
// flight. Lanes past the end pass zeros, at a row past the end.
template <class T, class Body>
__device__ __forceinline__ void each_vec_of_rows(const KernelInput& x, const RowVecs& layout,
                                                 Body body) {
  const auto load = [&](const Place& at) {
    if (at.all >= layout.end_row || at.col >= x.cols) return Vec16<T>{};
    return load_vec<T>(x, row_of<T>(x, at.batch, at.row), at.col);
  };
  std::uint32_t u = blockIdx.x * (kThreads * kVecsOfRows) + threadIdx.x;
  Place place = vec_place(layout, u);
  Vec16<T> vec = load(place);
#pragma unroll 1
  for (int i = 0; i < kVecsOfRows; ++i) {
    const Place at = place;
    const Vec16<T> now = vec;
    if (i + 1 < kVecsOfRows) {
      u += kThreads;
      place = vec_place(layout, u);
      vec = load(place);
    }
    body(now, at);
  }
}

// ---- By tiles -----------------------------------------------------------------------------------
struct TilePlace {
  std::uint32_t batch, row, col;  // of x
};
__device__ __forceinline__ TilePlace tile_place(const Tiles& tiles) {
  const std::uint32_t of_rows = tiles.across.divide(blockIdx.x);
  const std::uint32_t batch = tiles.down.divide(of_rows);
  return {batch, (of_rows - batch * tiles.down.d) * kTile,
          (blockIdx.x - of_rows * tiles.across.d) * kTile};
}

// A vec16 of the transpose in 16 words, each of which holds a pair of columns of x.
template <bool kUpper>
struct ColumnOfPairs {
  const std::uint32_t (&both)[kVec];
  __device__ __forceinline__ float operator[](int i) const {
    return bit_cast<float>(kUpper ? both[i] & 0xFFFF'0000u : both[i] << 16);
  }
  __device__ __forceinline__ operator Vec16<Bf16>() const {
    Vec16<Bf16> vec;
#pragma unroll
    for (int i = 0; i < kVec; i += 2)
      vec.w[i / 2] = __byte_perm(both[i], both[i + 1], kUpper ? 0x7632 : 0x5410);
    return vec;
  }
};

// A tile of x in shared memory: (kTile, kTile) of T.
template <class T>
struct SharedTile {
  static constexpr unsigned kWords = kTile * sizeof(T) / 4;  // a row
  static constexpr unsigned kBytes = kTile * kWords * 4;
  static constexpr unsigned kChunk = 16 / sizeof(T);  // elements
  std::uint32_t* words;

  // Returns the address of the row's 16-byte chunk.
  __device__ __forceinline__ std::uint32_t* chunk_at(unsigned row, unsigned chunk) const {
    return words + row * kWords + 4 * (chunk ^ (chunk / 8) ^ (row / kVec));
  }

  // Starts to copy the tile of x, zero past the edges. Every thread may read it after wait().
  template <bool kWhole = false>
  __device__ __forceinline__ void fill(const KernelInput& x, const TilePlace& tile) const {
    constexpr unsigned kChunks = kTile / kChunk, kStep = kThreads / kChunks;
    const unsigned chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks % kStep;
    const std::uint32_t col = tile.col + chunk * kChunk;
    const bool is_whole = x.aligned && tile.row + kTile <= x.rows && tile.col + kTile <= x.cols;
    if (kWhole || (is_whole && !x.rows_from)) {
      const T* from = row_at<T>(x, tile.batch, tile.row + first) + col;
      const std::int64_t step = kStep * x.row_stride;
#pragma unroll
      for (unsigned r = 0; r < kTile; r += kStep, from += step)
        copy_async_16(chunk_at(r + first, chunk), from, 16);
    } else {
      const unsigned in_row = col < x.cols ? min(static_cast<unsigned>(x.cols) - col, kChunk) : 0;
      const unsigned rows = min(static_cast<unsigned>(x.rows) - tile.row, unsigned{kTile});
#pragma unroll 1
      for (unsigned r = first; r < kTile; r += kStep) {
        const unsigned inside = r < rows ? in_row : 0;
        const T* from = inside > 0 ? row_of<T>(x, tile.batch, tile.row + r) + col : nullptr;
        T* to = reinterpret_cast<T*>(chunk_at(r, chunk));
        if (x.aligned)
          copy_async_16(to, inside > 0 ? from : x.data, inside * sizeof(T));
        else
          for (unsigned i = 0; i < kChunk; ++i) to[i] = i < inside ? from[i] : T{};
      }
    }
  }
  // Starts to copy a tile of whole, aligned columns, zero past the last row.   skip: rows of the
  // tile before tile.row, which are zero
  __device__ __forceinline__ void fill_rows(const KernelInput& x, const TilePlace& tile,
                                            std::uint32_t skip) const {
    if (skip == 0 && tile.row + kTile <= x.rows && !x.rows_from) return fill<true>(x, tile);
    constexpr unsigned kChunks = kTile / kChunk, kStep = kThreads / kChunks;
    const unsigned chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks % kStep;
    const unsigned rows = static_cast<unsigned>(x.rows) - tile.row;
    const auto is_inside = [&](unsigned r) { return r >= skip && r - skip < rows; };
    std::uint32_t at[kTile / kStep];  // in the memory of x
#pragma unroll
    for (unsigned i = 0; i < kTile / kStep; ++i) {
      const unsigned r = first + i * kStep;
      at[i] = tile.row + r - skip;
      if (x.rows_from) at[i] = is_inside(r) ? row_from(x, at[i]) : 0;
    }
#pragma unroll
    for (unsigned i = 0; i < kTile / kStep; ++i) {
      const unsigned r = first + i * kStep;
      const T* from = row_at<T>(x, tile.batch, at[i]) + tile.col + chunk * kChunk;
      copy_async_16(chunk_at(r, chunk), is_inside(r) ? from : x.data, is_inside(r) ? 16 : 0);
    }
  }
  // Flips the sign of each element of the rows whose sign is -1, of a tile that is complete.
  __device__ __forceinline__ void flip_rows(const HadamardSigns& signs) const {
    constexpr unsigned kChunks = kTile / kChunk, kStep = kThreads / kChunks;
    for (unsigned r = threadIdx.x / kChunks; r < kTile; r += kStep) {
      if (!(signs.w[r / 32] >> r % 32 & 1u)) continue;
      uint4* at = reinterpret_cast<uint4*>(chunk_at(r, threadIdx.x % kChunks));
      constexpr std::uint32_t kFlip = sizeof(T) == 2 ? 0x8000'8000u : 0x8000'0000u;
      *at = make_uint4(at->x ^ kFlip, at->y ^ kFlip, at->z ^ kFlip, at->w ^ kFlip);
    }
    __syncthreads();
  }
  __device__ __forceinline__ void wait() const {
    wait_for_copies();
    __syncthreads();
  }

  // Returns a vec16 of a row of x.
  __device__ __forceinline__ Vec16<T> vec_at(unsigned row, unsigned vec_col) const {
    constexpr unsigned kChunks = sizeof(Vec16<T>) / 16;
    Vec16<T> vec;
#pragma unroll
    for (unsigned c = 0; c < kChunks; ++c)
      reinterpret_cast<uint4*>(&vec)[c] =
          *reinterpret_cast<const uint4*>(chunk_at(row, vec_col * kChunks + c));
    return vec;
  }

  // Calls body(vec16, row of the tile as read) for the thread's vec16s of x or of its transpose.
  // For bf16 the transpose's are ColumnOfPairs.   lanes_log2: of the lanes that share a row, less
  // than log2 kVecColumns where only the first vec16 columns are needed
  template <bool kTransposed, class Body>
  __device__ __forceinline__ void each_vec(Body body, unsigned lanes_log2 = kVecColumnsLog2) const {
    const unsigned step = kThreads >> lanes_log2;
    const unsigned vec_col = threadIdx.x % (1u << lanes_log2),
                   lane_row = (threadIdx.x >> lanes_log2) % step;
    if constexpr (!kTransposed) {
#pragma unroll 1
      for (unsigned row = lane_row; row < kTile; row += step) body(vec_at(row, vec_col), row);
    } else if constexpr (sizeof(T) == 2) {  // a word holds two columns of x
      // A warp's lanes end together, so that the body may exchange values.
#pragma unroll 1
      for (unsigned pair = lane_row; pair < kTile / 2; pair += step) {
        const std::uint32_t* from = word_of_vec(vec_col, pair);
        std::uint32_t both[kVec];
#pragma unroll
        for (unsigned j = 0; j < kVec; ++j) both[j] = from[j * kWords];
        body(ColumnOfPairs<false>{both}, 2 * pair);
        body(ColumnOfPairs<true>{both}, 2 * pair + 1);
      }
    } else {
#pragma unroll 1
      for (unsigned row = lane_row; row < kTile; row += step) {
        const std::uint32_t* from = word_of_vec(vec_col, row);
        Vec16<T> vec;
#pragma unroll
        for (unsigned j = 0; j < kVec; ++j) vec.v[j] = bit_cast<float>(from[j * kWords]);
        body(vec, row);
      }
    }
  }

  // Returns word `word` of the first of the 16 rows that form a vec16 of the transpose.
  __device__ __forceinline__ const std::uint32_t* word_of_vec(unsigned vec_col,
                                                              unsigned word) const {
    return words + vec_col * kVec * kWords + (word ^ (4 * ((word / 32) ^ vec_col)));
  }
};

// ---- The transform ------------------------------------------------------------------------------
// Computes a stride of the butterflies from 16 on: of two lanes that are `lanes` apart.
__device__ __forceinline__ void add_lanes(float (&v)[kVec], int lanes) {
  const float sign = threadIdx.x & lanes ? -1.0f : 1.0f;
#pragma unroll
  for (int i = 0; i < kVec; ++i) v[i] = fmaf(v[i], sign, __shfl_xor_sync(kAllLanes, v[i], lanes));
}

// Computes core/hadamard.h without its factor: over a vec16, and over 2, 4 or 8 neighbouring lanes
// for more points, where the strides from 16 on pair the same element of two lanes.
//   vec: any type with 16 elements
template <class Elements>
__device__ __forceinline__ void hadamard_sums(const Elements& vec, int points, std::uint32_t signs,
                                              float (&v)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) v[i] = vec[i];
  minifloat::hadamard_sums<kVec>(v, signs);
#pragma unroll 1
  for (int lanes = 1; lanes < points / kVec; lanes *= 2) add_lanes(v, lanes);
}
// Returns v * factor in bf16. A NaN gives a NaN, of any bits.
__device__ __forceinline__ Vec16<Bf16> round_vec(const float (&v)[kVec], float factor) {
  Vec16<Bf16> out;
#pragma unroll
  for (int i = 0; i < kVec / 2; ++i)
    out.w[i] = cvt_bf16x2(v[2 * i] * factor, v[2 * i + 1] * factor);
  return out;
}
template <class Elements>
__device__ __forceinline__ Vec16<Bf16> hadamard_vec(const Elements& vec, int points,
                                                    std::uint32_t signs) {
  float v[kVec];
  hadamard_sums(vec, points, signs, v);
  return round_vec(v, hadamard_norm(points));
}

// Replaces each NaN by the one that every backend writes.
__device__ __forceinline__ std::uint32_t canonicalize_nan_magnitude(std::uint32_t bits) {
  return bits > Float32::kExponent ? Float32::kNanBits : bits;
}

}  // namespace minifloat::cuda
