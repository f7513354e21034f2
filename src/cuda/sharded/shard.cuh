// A shard of a weight on the device, and the loads of its elements: vec16s of a row, in tiles of
// 128 x 128 of the weight.
//
// A cell is the elements that share an amax (AmaxGrid): 2^h rows by 2^w columns of W, all of them
// where h or w is kAll.
#pragma once

#include <cstdint>

#include "cuda/common/tile.cuh"
#include "cuda/quantize/cast_vec16.cuh"
#include "minifloat/partial_cast.h"
#include "minifloat/spec.h"

namespace minifloat::cuda {

inline constexpr int kAll = 31;  // log2 of more than any size
inline constexpr int kRowStep = kThreads / kVecColumns, kPasses = kTile / kRowStep;

struct alignas(16) ShardEntry {
  const void* master;
  std::uint32_t* amaxes;  // (grid_rows, grid_cols), then the tensor's
  std::uint8_t* codes;    // the flat codes' byte `first_byte`
  void* scale;
  float* amax;
  std::int64_t begin, end, first_byte;
  std::uint32_t rows, cols, pitch;  // pitch: bytes of a row of flat codes
  std::uint32_t grid_rows, grid_cols;
  std::uint32_t across, first_tile_row;  // tiles of the shard; of the grid: across, 0
  int height_log2, width_log2;
  ScaleRule rule;
  ScaleRounding rounding;
  bool has_tensor_amax, delayed, columnwise;
  bool is_bf16, rounds, keeps_other_nibbles;

  __device__ __forceinline__ std::uint32_t cell(std::uint32_t row, std::uint32_t col) const {
    return (row >> height_log2) * grid_cols + (col >> width_log2);
  }
};

// Returns the entry without its tiles.
ShardEntry entry_of(const PartialCast& cast);

// ---- A run of a shard ---------------------------------------------------------------------------
// The elements of the run at (row, col) that are the shard's: [low, high) of kRun.
template <int kRun = kVec>
struct Inside {
  int low, high;
  __device__ __forceinline__ bool any() const { return low < high; }
  __device__ __forceinline__ bool all() const { return low == 0 && high == kRun; }
  __device__ __forceinline__ bool has(int i) const { return i >= low && i < high; }
};
template <int kRun = kVec>
__device__ __forceinline__ Inside<kRun> inside(const ShardEntry& e, std::uint32_t row,
                                               std::uint32_t col) {
  if (row >= e.rows || col >= e.cols) return {0, 0};
  const std::int64_t flat = std::int64_t{row} * e.cols + col;
  const std::int64_t high = min(min(e.end - flat, std::int64_t{e.cols} - col), std::int64_t{kRun});
  return {static_cast<int>(min(max(e.begin - flat, std::int64_t{0}), std::int64_t{kRun})),
          static_cast<int>(max(high, std::int64_t{0}))};
}

// Rounds the master's values to the compute dtype.
__device__ __forceinline__ void round_as_asked(const ShardEntry& e, Vec16<float>& vec) {
  if (!e.rounds) return;
  const Vec16<Bf16> half = round_vec(vec.v, 1.0f);
#pragma unroll
  for (int i = 0; i < kVec; ++i) vec.v[i] = half[i];
}
// Returns the amax of master values. A NaN that was rounded has the CPU's bits; one that was not
// keeps its bits.
__device__ __forceinline__ std::uint32_t magnitude_in(const ShardEntry& e, std::uint32_t bits) {
  return e.rounds ? canonicalize_nan_magnitude(bits) : bits;
}

__device__ __forceinline__ float load_element(const ShardEntry& e, std::int64_t i) {
  if (e.is_bf16) return decode_bf16(static_cast<const Bf16*>(e.master)[i]);
  const float x = static_cast<const float*>(e.master)[i];
  return e.rounds ? round_to_bf16(x) : x;
}

// Loads the shard's elements of a vec16 in the compute dtype; zero where they are another shard's.
__device__ __forceinline__ Vec16<float> load_master(const ShardEntry& e, std::uint32_t row,
                                                    std::uint32_t col, const Inside<>& in) {
  Vec16<float> vec = {};
  if (!in.any()) return vec;
  const std::int64_t first = std::int64_t{row} * e.cols + col - e.begin;
  const auto* from = static_cast<const std::uint8_t*>(e.master) + first * (e.is_bf16 ? 2 : 4);
  if (!in.all() || reinterpret_cast<std::uintptr_t>(from) % 16 != 0) {
#pragma unroll 1
    for (int i = in.low; i < in.high; ++i) {
      const float x = load_element(e, first + i);
#pragma unroll
      for (int k = 0; k < kVec; ++k)
        if (k == i) vec.v[k] = x;  // in registers
    }
    return vec;
  }
  const auto* chunks = reinterpret_cast<const uint4*>(from);
  if (e.is_bf16) {
    Vec16<Bf16> half;
    reinterpret_cast<uint4*>(&half)[0] = __ldg(chunks);
    reinterpret_cast<uint4*>(&half)[1] = __ldg(chunks + 1);
#pragma unroll
    for (int i = 0; i < kVec; ++i) vec.v[i] = half[i];
    return vec;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) reinterpret_cast<uint4*>(&vec)[i] = __ldg(chunks + i);
  round_as_asked(e, vec);
  return vec;
}

// ---- Scales and stores --------------------------------------------------------------------------
template <class F>
__device__ __forceinline__ MatrixScale scale_of_weight(const ShardEntry& e) {
  if (e.rule == ScaleRule::kTensor)
    return matrix_scale_of<F>(e.rule, e.rounding,
                              e.delayed ? magnitude_bits(e.amax[0]) : e.amaxes[0]);
  if (e.rule == ScaleRule::kNvfp4)
    return matrix_scale_of<F>(e.rule, e.rounding, e.amaxes[e.grid_rows * e.grid_cols]);
  return {};
}

// Returns a cell's amax, with the choice of its scale: choose_scales leaves the sign bit clear
// where the second scale is taken.
__device__ __forceinline__ std::uint32_t with_shard_choice(const ShardEntry& e,
                                                           std::uint32_t cell) {
  return reads_values(e.rounding) ? cell ^ kSecondScale : cell;
}

// Returns the address of the flat code of (row, col); col is even where two codes share a byte.
template <class F>
__device__ __forceinline__ std::uint8_t* flat_codes_at(const ShardEntry& e, std::uint32_t row,
                                                       std::uint32_t col) {
  const std::uint32_t byte = F::kBits == 8 ? col : col / 2;
  return e.codes + (std::int64_t{row} * e.pitch + byte - e.first_byte);
}

// Stores a byte of two codes, of which one may be another shard's.
template <int kRun>
__device__ __forceinline__ void store_pair(const ShardEntry& e, std::uint8_t* to, unsigned pair,
                                           std::uint32_t col, const Inside<kRun>& in, int i) {
  const unsigned mask = (in.has(i) ? 0x0Fu : 0u) | (in.has(i + 1) ? 0xF0u : 0u);
  if (mask == 0) return;
  const bool ends_row = col + i + 1 >= e.cols;  // an odd row's last nibble is padding
  const bool keeps = e.keeps_other_nibbles && mask != 0xFF && !ends_row;
  *to = static_cast<std::uint8_t>((pair & mask) | (keeps ? *to & ~mask : 0u));
}

// Stores the first kRun of `codes`, a byte at a time, where they are the shard's.
template <class F, int kRun>
__device__ __forceinline__ void store_run(const ShardEntry& e, std::uint8_t* to, Codes<F> codes,
                                          std::uint32_t col, const Inside<kRun>& in) {
#pragma unroll 1
  for (int i = 0; i < kRun; i += 8 / F::kBits, ++to) {
    const unsigned code = codes[0];
    codes.pop();
    if constexpr (F::kBits == 8) {
      if (in.has(i)) *to = static_cast<std::uint8_t>(code);
    } else {
      store_pair(e, to, code | codes[0] << 4, col, in, i);
      codes.pop();
    }
  }
}

// ---- Tiles --------------------------------------------------------------------------------------
// The place of this thread's vec16s of a tile: `pass` of kPasses.
struct TileOfShard {
  std::uint32_t row, col;  // of the tile's corner
  __device__ __forceinline__ std::uint32_t vec_row(int pass) const {
    return row + threadIdx.x / kVecColumns + pass * kRowStep;
  }
  __device__ __forceinline__ std::uint32_t vec_col() const {
    return col + threadIdx.x % kVecColumns * kVec;
  }
};
__device__ __forceinline__ TileOfShard tile_of(const ShardEntry& e, std::uint32_t tile) {
  const std::uint32_t down = tile / e.across;
  return {(e.first_tile_row + down) * kTile, (tile - down * e.across) * kTile};
}

}  // namespace minifloat::cuda
