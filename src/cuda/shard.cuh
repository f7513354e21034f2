// A shard of a weight as the device sees it, and how its elements come into registers: units of 16 neighbours of a row,
// in tiles of 128 x 128 of the weight.
//
// A cell is what shares an amax (AmaxGrid): 2^h rows by 2^w columns of W, all of them where h or w is kAll.
#pragma once

#include <cstdint>

#include "minifloat/spec.h"
#include "tile.cuh"

namespace minifloat::cuda {

inline constexpr int kAll = 31;  // log2 of more than any size
inline constexpr int kRowStep = kThreads / kUnitColumns, kPasses = kTile / kRowStep;

struct alignas(16) ShardEntry {
  const void* master;
  std::uint32_t* amaxes;  // (grid_rows, grid_cols), then the tensor's
  std::uint8_t* codes;    // where the wire's byte `first_byte` is
  void* scale;
  float* amax;
  std::int64_t begin, end, first_byte;
  std::uint32_t rows, cols, pitch;  // pitch: bytes of a row of the wire
  std::uint32_t grid_rows, grid_cols;
  std::uint32_t across, first_tile_row;  // tiles of the shard; of the grid: across, 0
  int height_log2, width_log2;
  ScaleRule rule;
  ScaleRounding rounding;
  bool has_tensor_amax, delayed, columnwise;
  bool is_bf16, rounds, keeps_neighbours;

  __device__ __forceinline__ std::uint32_t cell(std::uint32_t row, std::uint32_t col) const {
    return (row >> height_log2) * grid_cols + (col >> width_log2);
  }
};

// ---- A unit of a shard ---------------------------------------------------------------------------
// The elements of the unit at (row, col) that are the shard's: [low, high) of 16.
struct Inside {
  int low, high;
  __device__ __forceinline__ bool any() const { return low < high; }
  __device__ __forceinline__ bool all() const { return low == 0 && high == kUnit; }
};
__device__ __forceinline__ Inside inside(const ShardEntry& e, std::uint32_t row,
                                         std::uint32_t col) {
  if (row >= e.rows || col >= e.cols) return {0, 0};
  const std::int64_t flat = std::int64_t{row} * e.cols + col;
  const std::int64_t high = min(min(e.end - flat, std::int64_t{e.cols} - col), std::int64_t{kUnit});
  return {static_cast<int>(min(max(e.begin - flat, std::int64_t{0}), std::int64_t{kUnit})),
          static_cast<int>(max(high, std::int64_t{0}))};
}

__device__ __forceinline__ float load_element(const ShardEntry& e, std::int64_t i) {
  if (e.is_bf16) return decode_bf16(static_cast<const Bf16*>(e.master)[i]);
  const float x = static_cast<const float*>(e.master)[i];
  return e.rounds ? round_to_bf16(x) : x;
}

// The shard's elements of a unit in the compute dtype; zero where they are another's.
__device__ __forceinline__ Unit<float> load_master(const ShardEntry& e, std::uint32_t row,
                                                   std::uint32_t col, const Inside& in) {
  Unit<float> unit = {};
  if (!in.any()) return unit;
  const std::int64_t first = std::int64_t{row} * e.cols + col - e.begin;
  const auto* from = static_cast<const std::uint8_t*>(e.master) + first * (e.is_bf16 ? 2 : 4);
  if (!in.all() || reinterpret_cast<std::uintptr_t>(from) % 16 != 0) {
#pragma unroll 1
    for (int i = in.low; i < in.high; ++i) {
      const float x = load_element(e, first + i);
#pragma unroll
      for (int k = 0; k < kUnit; ++k)
        if (k == i) unit.v[k] = x;  // in registers
    }
    return unit;
  }
  const auto* chunks = reinterpret_cast<const uint4*>(from);
  if (e.is_bf16) {
    Unit<Bf16> half;
    reinterpret_cast<uint4*>(&half)[0] = __ldg(chunks);
    reinterpret_cast<uint4*>(&half)[1] = __ldg(chunks + 1);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) unit.v[i] = half[i];
    return unit;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) reinterpret_cast<uint4*>(&unit)[i] = __ldg(chunks + i);
  if (e.rounds) {
    const Unit<Bf16> half = round_unit(unit.v, 1.0f);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) unit.v[i] = half[i];
  }
  return unit;
}

// Where this thread's units of a tile are: `pass` of kPasses.
struct TileOfShard {
  std::uint32_t row, col;  // of the tile's corner
  __device__ __forceinline__ std::uint32_t unit_row(int pass) const {
    return row + threadIdx.x / kUnitColumns + pass * kRowStep;
  }
  __device__ __forceinline__ std::uint32_t unit_col() const {
    return col + threadIdx.x % kUnitColumns * kUnit;
  }
};
__device__ __forceinline__ TileOfShard tile_of(const ShardEntry& e, std::uint32_t tile) {
  const std::uint32_t down = tile / e.across;
  return {(e.first_tile_row + down) * kTile, (tile - down * e.across) * kTile};
}

}  // namespace minifloat::cuda
