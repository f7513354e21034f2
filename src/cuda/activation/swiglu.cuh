// The arguments of SwiGLU's kernels, and 8 neighbouring columns of h for its casts.
#pragma once

#include <cstdint>

#include "cuda/common/groups.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/common/vec8.cuh"
#include "minifloat/error.h"
#include "minifloat/experts.h"

namespace minifloat::cuda {

struct FastReciprocal {
  __device__ __forceinline__ float operator()(float x) const { return reciprocal_of_normal(x); }
};

struct SwiGluArgs {
  const void *gate, *up;  // rows `gate_stride` and `up_stride` elements apart; up null: ones
  std::int64_t gate_stride, up_stride;
  std::int64_t rows;
  int width;
  bool is_aligned, is_interleaved, has_limit;
  Activation activation;         // without a limit
  const float* weights;          // null: ones
  const std::int32_t* places;    // null: the rows' positions
  const std::int32_t* last_end;  // null: there are no groups
  SwiGluForm form;

  // Return the place of a row's weight, and that weight; of a place out of range zero.
  __device__ __forceinline__ std::uint32_t place_of(std::int64_t row) const {
    return static_cast<std::uint32_t>(places ? __ldg(places + row) : row);
  }
  __device__ __forceinline__ float weight_at(std::uint32_t place) const {
    if (!weights) return 1.0f;
    return place < rows ? __ldg(weights + place) : 0.0f;
  }
};

inline SwiGluArgs args_of(const SwiGlu& of) {
  MINIFLOAT_CHECK(of.width <= (1 << 30) && of.rows < (std::int64_t{1} << 31),
                  "swiglu: expected less than 2^31 rows and at most 2^30 columns, got ", of.rows,
                  " and ", of.width);
  const std::int64_t size = of.dtype == DType::kFloat32 ? 4 : 2;
  const bool is_aligned =
      has_aligned_rows(of.gate, of.gate_stride * size, of.rows) &&
      (of.is_interleaved || !of.up || has_aligned_rows(of.up, of.up_stride * size, of.rows)) &&
      (of.rows <= 1 || of.width * size % 16 == 0);
  return {of.gate,
          of.up,
          of.gate_stride,
          of.up_stride,
          of.rows,
          static_cast<int>(of.width),
          is_aligned,
          of.is_interleaved,
          of.has_limit,
          of.activation,
          of.weights,
          of.places,
          last_end_of(of.groups),
          {of.limit, of.alpha}};
}

// Returns the sum of a row's partials, in the order of core/swiglu.h: that of lane 0.
__device__ __forceinline__ float sum_of_partials(float (&partial)[kSwiGluVec]) {
#pragma unroll
  for (int half = kSwiGluVec / 2; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) partial[i] += partial[i + half];
  float sum = partial[0];
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2)
    sum += __shfl_down_sync(kAllLanes, sum, static_cast<unsigned>(half));
  return sum;
}

// ---- Columns of h, for casts --------------------------------------------------------------------
// Gate and up of 8 columns as they lie in memory, bf16: the columns of each, or pairs of both.
struct GateAndUp8 {
  uint4 first, second;
};
// Loads columns from `col` on, a multiple of 8; rows are aligned.
__device__ __forceinline__ GateAndUp8 load_gate_and_up(const SwiGluArgs& of, std::uint32_t row,
                                                       std::uint32_t col) {
  constexpr std::uint32_t kOnes = 0x3F80'3F80;
  const auto* gate = static_cast<const Bf16*>(of.gate) + row * of.gate_stride +
                     (of.is_interleaved ? 2 * col : col);
  const auto load = [](const Bf16* at) { return __ldg(reinterpret_cast<const uint4*>(at)); };
  if (of.is_interleaved) return {load(gate), load(gate + kSwiGluVec)};
  if (!of.up) return {load(gate), {kOnes, kOnes, kOnes, kOnes}};
  return {load(gate), load(static_cast<const Bf16*>(of.up) + row * of.up_stride + col)};
}

// Returns the largest magnitudes of 8 columns: those of the lower halves and of the upper ones, as
// a pair whose signs are undefined; NaN stays.
__device__ __forceinline__ std::uint32_t largest_pair(const std::uint32_t (&w)[kSwiGluVec / 2]) {
  return max_magnitude_bf16x2(max_magnitude_bf16x2(w[0], w[1]), max_magnitude_bf16x2(w[2], w[3]));
}
// Returns whether both magnitudes of a pair of bf16 are below a bound, given by its bits; NaN is
// not.
template <std::uint32_t kBound>
__device__ __forceinline__ bool is_below(std::uint32_t pair) {
  return (((pair & 0x7FFF'7FFFu) + (0x8000u - kBound) * 0x0001'0001u) & 0x8000'8000u) == 0;
}
// Returns whether one of a pair of bf16 is NaN.
__device__ __forceinline__ bool has_nan(std::uint32_t pair) { return !is_below<0x7F81>(pair); }

// Returns whether no gate of 8 columns is limited by the activation, which then takes fewer
// instructions.
template <Activation kActivation>
__device__ __forceinline__ bool is_in_range(const std::uint32_t (&gate)[kSwiGluVec / 2]) {
  constexpr float kRange = kActivationRange<kActivation>;
  static_assert((bit_cast<std::uint32_t>(kRange) & 0xFFFFu) == 0);
  return is_below<(bit_cast<std::uint32_t>(kRange) >> 16)>(largest_pair(gate));
}

// Return 8 columns of h, rounded to bf16.
template <bool kHasLimit, Activation kActivation, bool kIsInRange>
__device__ __forceinline__ Vec8<Bf16> values_of(const std::uint32_t (&gate)[kSwiGluVec / 2],
                                                const std::uint32_t (&up)[kSwiGluVec / 2],
                                                float weight, const SwiGluForm& form) {
  const auto h = [&](std::uint32_t g, std::uint32_t u) {
    return minifloat::swiglu<kHasLimit, kActivation, kIsInRange>(
        bit_cast<float>(g), bit_cast<float>(u), weight, form, FastReciprocal{});
  };
  Vec8<Bf16> out;
#pragma unroll
  for (int i = 0; i < kSwiGluVec / 2; ++i)
    out.set_pair(2 * i, h(gate[i] << 16, up[i] << 16),
                 h(gate[i] & 0xFFFF'0000u, up[i] & 0xFFFF'0000u));
  return out;
}
template <bool kHasLimit, Activation kActivation>
__device__ __forceinline__ Vec8<Bf16> h_of(const std::uint32_t (&gate)[kSwiGluVec / 2],
                                           const std::uint32_t (&up)[kSwiGluVec / 2], float weight,
                                           const SwiGluForm& form) {
  Vec8<Bf16> out;
  if (!kHasLimit && is_in_range<kActivation>(gate))
    out = values_of<kHasLimit, kActivation, !kHasLimit>(gate, up, weight, form);
  else
    out = values_of<kHasLimit, kActivation, false>(gate, up, weight, form);
  out.canonicalize_nans();
  return out;
}
template <bool kHasLimit, Activation kActivation>
__device__ __forceinline__ Vec8<Bf16> h_of(const SwiGluArgs& of, const GateAndUp8& in,
                                           float weight) {
  std::uint32_t gate[4] = {in.first.x, in.first.y, in.first.z, in.first.w},
                up[4] = {in.second.x, in.second.y, in.second.z, in.second.w};
  if (of.is_interleaved) {
    const std::uint32_t pairs[8] = {gate[0], gate[1], gate[2], gate[3], up[0], up[1], up[2], up[3]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      gate[i] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], 0x5410);
      up[i] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], 0x7632);
    }
  }
  return h_of<kHasLimit, kActivation>(gate, up, weight, of.form);
}
__device__ __forceinline__ Vec8<Bf16> h_of(const SwiGluArgs& of, const GateAndUp8& in,
                                           float weight) {
  if (of.has_limit) return h_of<true, Activation::kSilu>(of, in, weight);
  switch (of.activation) {
    case Activation::kGelu: return h_of<false, Activation::kGelu>(of, in, weight);
    case Activation::kGeluTanh: return h_of<false, Activation::kGeluTanh>(of, in, weight);
    case Activation::kSilu: break;
  }
  return h_of<false, Activation::kSilu>(of, in, weight);
}

// Returns the bits of the larger magnitude of a pair.
__device__ __forceinline__ std::uint32_t larger_of_pair(std::uint32_t pair) {
  return max(pair & 0x7FFF'0000u, (pair << 16) & Float32::kMagnitude);
}
// Returns the bits of the largest magnitude of 8 columns, as Vec16's amax does.
__device__ __forceinline__ std::uint32_t amax_of(const Vec8<Bf16>& h) {
  return larger_of_pair(largest_pair(h.w));
}

}  // namespace minifloat::cuda
