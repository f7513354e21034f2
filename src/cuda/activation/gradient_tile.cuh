// A tile of the gradients of gate and up and of h in shared memory, which a block computes. A
// thread has the next chunk's loads in flight.
//
//     tile          0          1      2
//                   d_gate     h      d_up
//
//     bytes an element: 6 read (4 without up)
#pragma once

#include "cuda/activation/swiglu.cuh"
#include "cuda/common/layout.h"
#include "cuda/common/reduce.cuh"
#include "cuda/common/tile.cuh"

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

// Eight columns of dh, gate and up, and of the results.
struct GradientChunk {
  Vec8<Bf16> dh, gate, up;
};
struct GradientResults {
  Vec8<Bf16> d_gate, h, d_up;
};

// Loads columns from `col` on. Without up, that is ones.
__device__ __forceinline__ GradientChunk load_chunk(const GradientArgs& in, std::uint32_t row,
                                                    std::uint32_t col) {
  const auto load = [](const void* base, std::int64_t at) {
    Vec8<Bf16> v;
    *reinterpret_cast<uint4*>(v.w) =
        *reinterpret_cast<const uint4*>(static_cast<const Bf16*>(base) + at);
    return v;
  };
  constexpr std::uint32_t kOnes = 0x3F80'3F80;
  return {load(in.dh, row * in.dh_stride + col), load(in.of.gate, row * in.of.gate_stride + col),
          in.of.up ? load(in.of.up, row * in.of.up_stride + col)
                   : Vec8<Bf16>{{kOnes, kOnes, kOnes, kOnes}}};
}

// Returns the results before NaNs have one pattern.   kHasUp: else up is ones
template <Activation kActivation, bool kHasUp, bool kIsInRange>
__device__ __forceinline__ GradientResults raw_results(const GradientChunk& in) {
  constexpr float kWeight = 1.0f;
  GradientResults out;
#pragma unroll
  for (int j = 0; j < kSwiGluVec; j += 2) {
    SwiGluGradient d[2];
    float value[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float up = kHasUp ? in.up[j + k] : 1.0f;
      const SwiGluFactors f =
          swiglu_factors<false, kActivation, kIsInRange>(in.gate[j + k], up, {}, FastReciprocal{});
      d[k] = swiglu_gradient(f, in.dh[j + k], kWeight);
      value[k] = minifloat::swiglu(f, kWeight);
    }
    out.d_gate.set_pair(j, d[0].gate, d[1].gate);
    out.h.set_pair(j, value[0], value[1]);
    out.d_up.set_pair(j, d[0].up, d[1].up);
  }
  return out;
}

// Returns the results, and raises their largest magnitudes.   kHasH, kHasUp: h, d_up are read
template <Activation kActivation, bool kHasH, bool kHasUp>
__device__ __forceinline__ GradientResults gradient_results(const GradientChunk& in,
                                                            LargestPairs& largest) {
  GradientResults out;
  if (is_in_range<kActivation>(in.gate.w))
    out = raw_results<kActivation, kHasUp, true>(in);
  else
    out = raw_results<kActivation, kHasUp, false>(in);
  const std::uint32_t of_gate = largest_pair(out.d_gate.w);
  largest.of[0] = max_magnitude_bf16x2(largest.of[0], of_gate);
  std::uint32_t all = of_gate;
  if constexpr (kHasH) {
    const std::uint32_t of_h = largest_pair(out.h.w);
    largest.of[1] = max_magnitude_bf16x2(largest.of[1], of_h);
    all = max_magnitude_bf16x2(all, of_h);
  }
  if constexpr (kHasUp) {
    const std::uint32_t of_up = largest_pair(out.d_up.w);
    largest.of[2] = max_magnitude_bf16x2(largest.of[2], of_up);
    all = max_magnitude_bf16x2(all, of_up);
  }
  if (has_nan(all))
    out.d_gate.canonicalize_nans(), out.h.canonicalize_nans(), out.d_up.canonicalize_nans();
  return out;
}

struct GradientTile {
  std::uint32_t* words;

  __device__ __forceinline__ SharedTile<Bf16> tile(int i) const {
    return {words + i * (SharedTile<Bf16>::kBytes / 4)};
  }

  // The thread's chunk of 8 columns, and its rows.
  static constexpr unsigned kChunks = kTile / kSwiGluVec, kStep = kGradientThreads / kChunks;
  __device__ __forceinline__ static unsigned chunk() { return threadIdx.x % kChunks; }
  __device__ __forceinline__ static unsigned first_row() { return threadIdx.x / kChunks; }

  // Starts the loads of the thread's first chunk.
  __device__ __forceinline__ static GradientChunk first(const GradientArgs& args,
                                                        const TilePlace& place) {
    return load_chunk(args, place.row + first_row(), place.col + chunk() * kSwiGluVec);
  }

  // Computes the tile.   next: from first(); kStores: else only the largest magnitudes are found
  template <bool kStores>
  __device__ __forceinline__ void compute(const GradientArgs& args, const TilePlace& place,
                                          const GradientChunk& next, LargestPairs& largest) const {
    switch (args.of.activation) {
      case Activation::kSilu:
        return compute<kStores, Activation::kSilu>(args, place, next, largest);
      case Activation::kGelu:
        return compute<kStores, Activation::kGelu>(args, place, next, largest);
      case Activation::kGeluTanh:
        return compute<kStores, Activation::kGeluTanh>(args, place, next, largest);
    }
  }

 private:
  template <bool kStores, Activation kActivation>
  __device__ __forceinline__ void compute(const GradientArgs& args, const TilePlace& place,
                                          GradientChunk next, LargestPairs& largest) const {
    const auto store = [&](int i, unsigned row, const Vec8<Bf16>& v) {
      v.store(reinterpret_cast<Bf16*>(tile(i).chunk_at(row, chunk())));
    };
#pragma unroll 1
    for (unsigned row = first_row(); row < kTile; row += kStep) {
      const GradientChunk in = next;
      if (row + kStep < kTile)
        next = load_chunk(args, place.row + row + kStep, place.col + chunk() * kSwiGluVec);
      const GradientResults out = gradient_results<kActivation, true, true>(in, largest);
      if constexpr (kStores) {
        store(0, row, out.d_gate);
        if (args.has_h) store(1, row, out.h);
        if (args.of.up) store(2, row, out.d_up);
      }
    }
  }
};

// Raises largest[i], in shared memory, by the thread's values. Zeros before.
__device__ __forceinline__ void raise_in_block(const LargestPairs& pairs, std::uint32_t* largest) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const std::uint32_t m =
        warp_max(max(pairs.of[i] & 0x7FFF'0000u, (pairs.of[i] << 16) & Float32::kMagnitude));
    if (threadIdx.x % 32 == 0) atomicMax(largest + i, canonicalize_nan_magnitude(m));
  }
}

}  // namespace minifloat::cuda
