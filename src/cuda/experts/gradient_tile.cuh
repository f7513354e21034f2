// A tile of the gradients of gate and up and of h, in shared memory: dh, gate and up are copied
// there, and each thread replaces the chunks that it copied.
//
//     tile          0          1      2
//     copied        dh         gate   up
//     computed      d_gate     h      d_up
//
//     bytes an element: 6 read (4 without up)
#pragma once

#include "cuda/common/layout.h"
#include "cuda/common/reduce.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/experts/swiglu.cuh"

namespace minifloat::cuda {

inline constexpr int kGradientThreads = 512;  // of a block; two blocks an SM

// dh, gate and up, bf16, of whole tiles, rows at multiples of 16 bytes.
struct GradientArgs {
  SwiGluArgs of;
  const Bf16* dh;
  std::int64_t dh_stride;
  bool has_h;      // h is computed
  Divisor across;  // tiles

  // Returns the bytes of shared memory: without up a block has two tiles.
  std::size_t shared_bytes() const {
    return (of.up ? 3 : 2) * std::size_t{SharedTile<Bf16>::kBytes};
  }
};

__device__ __forceinline__ TilePlace gradient_place(const GradientArgs& args) {
  const std::uint32_t of_rows = args.across.divide(blockIdx.x);
  return {0, of_rows * kTile, (blockIdx.x - of_rows * args.across.d) * kTile};
}

// The largest magnitudes of a thread's results, pairs of bf16 that stay apart: of d_gate, h, d_up.
struct LargestPairs {
  std::uint32_t of[3] = {0, 0, 0};
};

struct GradientTile {
  std::uint32_t* words;

  __device__ __forceinline__ SharedTile<Bf16> tile(int i) const {
    return {words + i * (SharedTile<Bf16>::kBytes / 4)};
  }

  // Calls body(row, chunk) for the thread's chunks of 8 columns.
  template <class Body>
  __device__ __forceinline__ static void each_chunk(Body body) {
    constexpr unsigned kChunks = kTile / kSwiGluVec, kStep = kGradientThreads / kChunks;
    const unsigned chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
#pragma unroll
    for (unsigned r = 0; r < kTile; r += kStep) body(first + r, chunk);
  }

  // Starts the copies. They have arrived, for this thread, after wait_for_copies().
  __device__ __forceinline__ void fill(const GradientArgs& args, const TilePlace& place) const {
    const SwiGluArgs& of = args.of;
    each_chunk([&](unsigned row, unsigned chunk) {
      const std::int64_t r = place.row + row;
      const std::uint32_t col = place.col + chunk * kSwiGluVec;
      copy_async_16(tile(0).chunk_at(row, chunk), args.dh + r * args.dh_stride + col, 16);
      copy_async_16(tile(1).chunk_at(row, chunk),
                    static_cast<const Bf16*>(of.gate) + r * of.gate_stride + col, 16);
      if (of.up)
        copy_async_16(tile(2).chunk_at(row, chunk),
                      static_cast<const Bf16*>(of.up) + r * of.up_stride + col, 16);
    });
  }

  // Computes in place.   kStores: else only the largest magnitudes are found
  template <bool kStores>
  __device__ __forceinline__ void compute(const GradientArgs& args, LargestPairs& largest) const {
    switch (args.of.activation) {
      case Activation::kSilu: return compute<kStores, Activation::kSilu>(args, largest);
      case Activation::kGelu: return compute<kStores, Activation::kGelu>(args, largest);
      case Activation::kGeluTanh: return compute<kStores, Activation::kGeluTanh>(args, largest);
    }
  }

 private:
  using Vec = Vec8<Bf16>;

  __device__ __forceinline__ static Vec load(const std::uint32_t* from) {
    Vec v;
    *reinterpret_cast<uint4*>(v.w) = *reinterpret_cast<const uint4*>(from);
    return v;
  }
  template <bool kStores>
  __device__ __forceinline__ static void finish(Vec& v, std::uint32_t* to, std::uint32_t& largest) {
    v.name_nans();
    largest =
        max_magnitude_bf16x2(largest, max_magnitude_bf16x2(max_magnitude_bf16x2(v.w[0], v.w[1]),
                                                           max_magnitude_bf16x2(v.w[2], v.w[3])));
    if constexpr (kStores) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(v.w);
  }
  template <bool kStores, Activation kActivation>
  __device__ __forceinline__ void compute(const GradientArgs& args, LargestPairs& largest) const {
    constexpr float kWeight = 1.0f;
    const bool has_up = args.of.up;
#pragma unroll 1
    for (unsigned i = 0; i < kTile * kTile / kSwiGluVec / kGradientThreads; ++i) {
      constexpr unsigned kChunks = kTile / kSwiGluVec, kStep = kGradientThreads / kChunks;
      const unsigned row = threadIdx.x / kChunks + i * kStep, chunk = threadIdx.x % kChunks;
      std::uint32_t* const at[3] = {tile(0).chunk_at(row, chunk), tile(1).chunk_at(row, chunk),
                                    tile(2).chunk_at(row, chunk)};
      const Vec dh = load(at[0]), gate = load(at[1]);
      Vec up = {{0x3F80'3F80u, 0x3F80'3F80u, 0x3F80'3F80u, 0x3F80'3F80u}};
      if (has_up) up = load(at[2]);
      Vec d_gate, h, d_up;
#pragma unroll
      for (int j = 0; j < kSwiGluVec; j += 2) {
        SwiGluGradient d[2];
        float value[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const SwiGluFactors f =
              swiglu_factors<false, kActivation>(gate[j + k], up[j + k], {}, FastReciprocal{});
          d[k] = swiglu_gradient(f, dh[j + k], kWeight);
          value[k] = minifloat::swiglu(f, kWeight);
        }
        d_gate.set_pair(j, d[0].gate, d[1].gate);
        h.set_pair(j, value[0], value[1]);
        d_up.set_pair(j, d[0].up, d[1].up);
      }
      finish<kStores>(d_gate, at[0], largest.of[0]);
      if (args.has_h) finish<kStores>(h, at[1], largest.of[1]);
      if (has_up) finish<kStores>(d_up, at[2], largest.of[2]);
    }
  }
};

// Raises largest[i], in shared memory, by the thread's values. Zeros before.
__device__ __forceinline__ void raise_in_block(const LargestPairs& pairs, std::uint32_t* largest) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const std::uint32_t m =
        warp_max(max(pairs.of[i] & 0x7FFF'0000u, (pairs.of[i] << 16) & Float32::kMagnitude));
    if (threadIdx.x % 32 == 0) atomicMax(largest + i, canonical_magnitude(m));
  }
}

}  // namespace minifloat::cuda
