// Scales in the fewest steps of this hardware. The rules are core/scale_rule.h's, and each faster
// form below is equal to its equation of core/scaling.h. tests/gpu/test_exhaustive.py visits every
// amax of a block, and every E4M3 scale beside every tensor scale's exponent.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/ptx.cuh"
#include "minifloat/core/scale_rule.h"
#include "minifloat/spec.h"

namespace minifloat::cuda {

// The scale of a whole matrix.
struct MatrixScale : TensorScale {
  bool takes_fast_path;  // of NVFP4: no block's factor is near the ends of fp32
};
template <class F>
__device__ __forceinline__ MatrixScale matrix_scale_of(ScaleRule rule, ScaleRounding rounding,
                                                       std::uint32_t amax) {
  MatrixScale matrix = {scale_of_tensor<F>(rule, rounding, amax), false};
  matrix.takes_fast_path = F::kBits == 4 && matrix.scale >= 0x1p-90f && matrix.scale <= 0x1p90f;
  return matrix;
}

// Returns the scale of a matrix or row with blocks that have E4M3 scales.
__device__ __forceinline__ float scale_above_blocks(const Spec& spec, float amax) {
  const std::uint32_t bits = magnitude_bits(amax);
  return spec.elements == Elements::kE1m2
             ? scale_of_tensor<E1M2>(spec.rule, spec.scale_rounding, bits).scale
             : scale_of_tensor<E2M1>(spec.rule, spec.scale_rounding, bits).scale;
}

// The scale of a block. takes_fast_path: Encoding's (encode.cuh), decided by the scale alone.
struct BlockScale : minifloat::BlockScale {
  bool takes_fast_path = false;
};

// Returns x / 6 to nearest, for an x of at least 2^-90: x times the float nearest 1/6, plus x times
// what that float lacks of 1/6, a negative number. Before its last rounding the sum is within 2^-47
// of x / 6, which is no nearer than 1/6 of a last place to where floats round.
__device__ __forceinline__ float divide_by_six(float x) {
  constexpr double kSixth = 1.0 / 6.0;
  constexpr float kHigh = static_cast<float>(kSixth);
  constexpr float kLow = static_cast<float>(kSixth - kHigh);
  return fmaf(x, kHigh, x * kLow);
}

struct DeviceEquations {
  using Tensor = MatrixScale;
  using Block = BlockScale;

  // fp8_factors as a power of two, without its division: 2^floor(log2(max / amax)), at most 2^127.
  template <class F>
  __device__ __forceinline__ static ScaleFactors power_of_two_factors(std::uint32_t amax) {
    constexpr std::uint32_t kMax = bit_cast<std::uint32_t>(F::kMax);
    constexpr int kEmax = static_cast<int>(kMax >> Float32::kMantissaBits) - Float32::kBias;
    // amax's exponent, and one more where its mantissa is past max's
    const int exponent = static_cast<int>(
        (amax + (Float32::kMantissa - (kMax & Float32::kMantissa))) >> Float32::kMantissaBits);
    const int e = min(kEmax + 2 * Float32::kBias - exponent, 254);  // biased; at least 7
    const std::uint32_t code = amax == 0 ? Float32::kBias : static_cast<std::uint32_t>(e);
    const ScaleFactors factors = {decode_e8m0(code), e8m0_reciprocal(code)};
    return {is_finite(amax) ? factors.encode : nan_value(),
            is_finite(amax) ? factors.scale : nan_value()};
  }

  // mx_scale_up, by the instruction where there is one.
  template <class F>
  __device__ __forceinline__ static std::uint32_t mx_code(std::uint32_t amax) {
#if defined(MINIFLOAT_HAS_FP4_CONVERSIONS)
    if constexpr (std::is_same_v<F, E1M2>)
      return mx_scale_up<F>(amax);
    else
      return mx_scale_of_rounded<F>(cvt_up_ue8m0(mx_quotient<F>(amax)), amax);
#else
    return mx_scale_up<F>(amax);
#endif
  }
  template <class F>
  __device__ __forceinline__ static Block mx(ScaleRounding rounding, std::uint32_t amax) {
    const bool is_floor = rounding == ScaleRounding::kFloor;
    const std::uint32_t code = is_floor ? mx_scale_floor<F>(amax) : mx_code<F>(amax);
    // Every other element format reaches at least 2^2, so that no finite block's code is 254.
    const float reciprocal = std::is_same_v<F, E1M2> ? e8m0_reciprocal(code)
                                                     : bit_cast<float>((E8M0::kMaxBits - code)
                                                                       << Float32::kMantissaBits);
    // A scale rounded up leaves no product above max, but under code 254. Up to this scale the
    // factor is at least 2^-105.
    constexpr std::uint32_t kMostForFastPath = E8M0::kBias + 105;
    return {{code, decode_e8m0(code), is_finite(amax) ? reciprocal : nan_value()},
            !is_floor && code <= kMostForFastPath};
  }

  // nvfp4_block_scale and nvfp4_encode_factor.
  __device__ __forceinline__ static Block nvfp4(ScaleRounding rounding, const Tensor& tensor,
                                                std::uint32_t amax) {
    Block block = nvfp4_without_factor(rounding, tensor, amax);
    add_factor(block, tensor, block.takes_fast_path);
    return block;
  }
  // nvfp4_block_scale. The code to nearest, and up to a power of two, is the instruction's, which
  // saturates.
  __device__ __forceinline__ static Block nvfp4_without_factor(ScaleRounding rounding,
                                                               const Tensor& tensor,
                                                               std::uint32_t amax) {
    if (rounding == ScaleRounding::kFourOverSix) return four_over_six(tensor, amax);
    const bool is_power_of_two = rounding == ScaleRounding::kPowerOfTwo;
    float v = bit_cast<float>(amax) * tensor.block_encode;
    bool saturates = false;
    std::uint32_t code;
    if (rounding == ScaleRounding::kUp) {
      code = nvfp4_block_scale(amax, tensor.block_encode, Nvfp4Rounding::kUp);
    } else {
      if (is_power_of_two && v > 0.0f) {
        constexpr float kLeast = 0x1p-9f;  // code 1
        saturates = v > E4M3::kMaxPowerOfTwo;
        const float capped = saturates ? E4M3::kMaxPowerOfTwo : v;
        const std::uint32_t up =
            (bit_cast<std::uint32_t>(capped) + Float32::kMantissa) & Float32::kExponent;
        v = fmaxf(bit_cast<float>(up), kLeast);
      }
      code = is_finite(amax) ? cvt_e4m3x2(v, 0.0f) & 0xFFu : E4M3::kNanBits;
    }
    return without_factor(code, tensor, saturates);
  }

  // four_over_six_scale: the code by the instruction, which saturates. The fast path needs no
  // division.
  __device__ __forceinline__ static Block four_over_six(const Tensor& tensor, std::uint32_t bits) {
    const float amax = bit_cast<float>(bits & ~kSecondScale);
    const float sixth =
        tensor.takes_fast_path && amax >= 0x1p-90f ? divide_by_six(amax) : amax / E2M1::kMax;
    const float base = sixth * tensor.encode;
    const float v = bits & kSecondScale ? base * (E2M1::kMax / E2M1::kMaxPowerOfTwo) : base;
    const bool finite = is_finite(bits & ~kSecondScale);
    return without_factor(finite ? cvt_e4m3x2(v, 0.0f) & 0xFFu : E4M3::kNanBits, tensor, false);
  }
  // saturates: the scale is smaller than its amax requires.
  __device__ __forceinline__ static Block without_factor(std::uint32_t code, const Tensor& tensor,
                                                         bool saturates) {
    constexpr std::uint32_t kLeastNormal = 1u << E4M3::kMantissaBits;
    // A normal scale below the largest is at most half its last place under its block's amax / max,
    // so that |x| * factor < 6.4 for E2M1.
    const bool takes_fast_path =
        tensor.takes_fast_path && code - kLeastNormal < E4M3::kMaxBits - kLeastNormal && !saturates;
    return {{code, decode_e4m3(code), 0.0f}, takes_fast_path};
  }
  // Completes a block's scale.   takes_fast_path: at most the block's
  __device__ __forceinline__ static void add_factor(Block& block, const Tensor& tensor,
                                                    bool takes_fast_path) {
    const float denominator = block.scale * tensor.scale;
    block.encode =
        takes_fast_path ? reciprocal_of_normal(denominator) : at_most_float_max(1.0f / denominator);
  }
};

template <class F>
__device__ __forceinline__ BlockScale block_scale(ScaleRule rule, ScaleRounding rounding,
                                                  const MatrixScale& matrix, std::uint32_t amax) {
  return scale_of_block<F, DeviceEquations>(rule, rounding, matrix, amax);
}

}  // namespace minifloat::cuda
