// The choice under a rule that reads values (core/scale_rule.h): which of a block's two scales has
// the smaller error.
//
//     any         core/scale_rule.h's squared_error, element by element
//     fast path   the same sums in fewer steps, if the tensor's scale is far from the ends of fp32
//     bounded     sums near the errors: they decide where their distance exceeds the bound
//
// tests/gpu/test_exhaustive.py visits every bf16 beside every E4M3 scale.
#pragma once

#include <cstdint>

#include "cuda/codec/encode.cuh"
#include "cuda/codec/scale.cuh"

namespace minifloat::cuda {

struct BlockScales {
  BlockScale first, second;
};
__device__ __forceinline__ BlockScales both_scales(ScaleRule rule, ScaleRounding rounding,
                                                   const MatrixScale& matrix, std::uint32_t amax) {
  return {block_scale<E2M1>(rule, rounding, matrix, amax),
          block_scale<E2M1>(rule, rounding, matrix, amax | kSecondScale)};
}

// ---- Any ----------------------------------------------------------------------------------------
template <class T>
__device__ __forceinline__ float error_of_any(const MatrixScale& matrix, const BlockScale& block,
                                              const Vec16<T>& vec) {
  float v[kVec], sum = 0.0f;  // indexed by a loop that is not unrolled
#pragma unroll
  for (int i = 0; i < kVec; ++i) v[i] = vec[i];
#pragma unroll 1
  for (int i = 0; i < kVec; ++i)
    sum = sum + squared_error<E2M1>(matrix, block.scale, encode<E2M1>(v[i] * block.encode), v[i]);
  return sum;
}

// ---- The fast path ------------------------------------------------------------------------------
// The values of codes 1 and 1.5 in a block, times kCodeScale. Any other code is one of them times a
// power of two.
inline constexpr float kCodeScale = 0x1p6f;  // the divisor of round_to_e2m1_grid's codes
struct CodeValues {
  float one, one_and_half;
};
// Returns four_over_six_value without its division: fl32(x / 1536) is fl32(x / 6) / 256.
__device__ __forceinline__ CodeValues code_values(const MatrixScale& matrix,
                                                  const BlockScale& block) {
  constexpr float kOverCodes = kCodeScale / E4M3::kMaxPowerOfTwo;
  return {divide_by_six(block.scale * matrix.amax) * kOverCodes,
          divide_by_six(1.5f * block.scale * matrix.amax) * kOverCodes};
}
template <class T>
__device__ __forceinline__ float error_by_fast_path(const MatrixScale& matrix,
                                                    const BlockScale& block, const Vec16<T>& vec) {
  const CodeValues values = code_values(matrix, block);
  // The one bit of E2M1's mantissa. Near a power of two the grid has a lower bit besides, which the
  // conversion to codes drops.
  constexpr std::uint32_t kUpperHalf = 1u << (Float32::kMantissaBits - 1);
  const float factor = block.encode / kCodeScale;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const float x = fabsf(vec[i]);
    const float scaled = fminf(x * factor, E2M1::kMax / kCodeScale);
    const std::uint32_t grid = bit_cast<std::uint32_t>(round_to_e2m1_grid(scaled));
    const float power = bit_cast<float>(grid & Float32::kExponent);
    const float of_code = grid & kUpperHalf ? values.one_and_half : values.one;
    const float d = fmaf(power, of_code, -x);  // the product is exact
    sum = sum + d * d;
  }
  return sum;
}

// ---- Bounded ------------------------------------------------------------------------------------
// The adder rounds y = |x| * factor to the grid, as in round_to_e2m1_grid: y + b * 2^22 ends in the
// place where the grid ends, for a b of y's binade, or just below y. b is a power of two or
// has few bits, so that the sum stays in the binade of b * 2^22.
inline constexpr float kMagic = 0x1p22f;
inline constexpr float kLowestMagic = kMagic / kCodeScale;  // for codes up to 1

// b * 2^22 of the 16 elements: the power of two below y.
struct MagicOfFloats {
  float factor;  // of elements, times 2^22
  const Vec16<float>& vec;

  __device__ __forceinline__ MagicOfFloats(float factor_of_elements, const Vec16<float>& vec)
      : factor(factor_of_elements * kMagic), vec(vec) {}
  __device__ __forceinline__ float operator[](int i) const {
    const std::uint32_t power = bit_cast<std::uint32_t>(vec[i] * factor) & Float32::kExponent;
    return fmaxf(bit_cast<float>(power), kLowestMagic);
  }
};
// b * 2^22 of the 16 elements in pairs of bf16: between 0.97 y and y. Where that is in the binade
// below, y is near a power of two, to which both binades round it.
struct MagicOfPairs {
  std::uint32_t w[kVec / 2];

  __device__ __forceinline__ MagicOfPairs(float factor_of_elements, const Vec16<Bf16>& vec) {
    constexpr float kBelow = 1.0f - 0x1p-6f;
    constexpr std::uint32_t kLowestPair = (bit_cast<std::uint32_t>(kLowestMagic) >> 16) * 0x1'0001u;
    const std::uint32_t factor =
        bit_cast<std::uint32_t>(factor_of_elements * kMagic * kBelow) >> 16;
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i)
      w[i] = max_bf16x2(mul_bf16x2(vec.w[i] & 0x7FFF'7FFFu, factor * 0x1'0001u), kLowestPair);
  }
  // The upper of a pair keeps the lower's bits, which leave it a multiple of the grid's last place,
  // and further below the next power of two than y: they are at most 0x48E0 of 0xFFFF.
  __device__ __forceinline__ float operator[](int i) const {
    return bit_cast<float>(i % 2 ? w[i / 2] : w[i / 2] << 16);
  }
};
__device__ __forceinline__ MagicOfFloats magic_of(float factor, const Vec16<float>& vec) {
  return {factor, vec};
}
__device__ __forceinline__ MagicOfPairs magic_of(float factor, const Vec16<Bf16>& vec) {
  return {factor, vec};
}

// Returns a block's error under the fast-path condition, nearly: from the distances of |x| * factor
// to the grid, where no product reaches 7. A tie may be rounded either way.
template <class T>
__device__ __forceinline__ float distance_of_vec(const BlockScale& block, const Vec16<T>& vec) {
  const float factor = block.encode / kCodeScale;
  const auto magic = magic_of(factor, vec);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const float x = fabsf(vec[i]), b = magic[i];
    const float d = fmaf(x, factor, b - fmaf(x, factor, b));
    sum = fmaf(d, d, sum);
  }
  return sum;
}

// A pair of sums, under a block's first scale and under its second.
struct Errors {
  float first, second;
};
template <class T>
__device__ __forceinline__ Errors distances_of_vec(const BlockScales& scales, const Vec16<T>& vec) {
  return {distance_of_vec(scales.first, vec), distance_of_vec(scales.second, vec)};
}

// A decision by the bound, from the distances of a block of kRows vec16s. For a block of amax a,
// each element's d here and in squared_error differ by at most 12 roundings of a, 2^-20 a. By
// Cauchy-Schwarz a sum E of n elements then differs by at most 2 * 2^-20 a * sqrt(n E) + 2^-40 n
// a^2, and by 2^-18 E for the roundings of both sums, of n = 256 by 2^-17 E:
//
//     n = 16     at most 2^-20 a^2 + 2^-16 E, and 2^-18 E
//     n = 256    at most 2^-16 a^2 + 2^-16 E + 2^-32 a^2, and 2^-17 E
//
// kOfAmax and kOfErrors are more than that for two sums, by 2^-19 a^2 or more: from kLeastAmax on,
// more than the 2^-141 that squares lose where they are subnormal.
inline constexpr float kLeastAmax = 0x1p-60f;
struct Decision {
  bool is_sure, takes_second;
};
template <int kRows>
__device__ __forceinline__ Decision decide_by_bound(const MatrixScale& matrix,
                                                    const BlockScales& scales, float amax,
                                                    const Errors& distances) {
  static_assert(kRows == 1 || kRows == 16);
  constexpr float kOfAmax = kRows == 1 ? 0x1p-18f : 0x1p-14f, kOfErrors = 0x1p-14f;
  const float one_first = code_values(matrix, scales.first).one,
              one_second = code_values(matrix, scales.second).one;
  const float first = distances.first * one_first * one_first;
  const float second = distances.second * one_second * one_second;
  const float bound = fmaf(amax * amax, kOfAmax, (first + second) * kOfErrors);
  return {fabsf(first - second) > bound, second < first};
}

// ---- Choices ------------------------------------------------------------------------------------
// Returns whether a block's distances decide, if they are far enough apart.
__device__ __forceinline__ bool takes_bound(const BlockScales& scales, std::uint32_t amax) {
  return scales.first.takes_fast_path && scales.second.takes_fast_path &&
         bit_cast<float>(amax) >= kLeastAmax;
}

// Returns the errors of a vec16 of a block.
template <class T>
__device__ __forceinline__ Errors errors_of_vec(const MatrixScale& matrix,
                                                const BlockScales& scales, const Vec16<T>& vec) {
  if (matrix.takes_fast_path)
    return {error_by_fast_path(matrix, scales.first, vec),
            error_by_fast_path(matrix, scales.second, vec)};
  return {error_of_any(matrix, scales.first, vec), error_of_any(matrix, scales.second, vec)};
}

// Returns the scale of a block that is one vec16.
template <class T>
__device__ __forceinline__ BlockScale scale_by_values(ScaleRule rule, ScaleRounding rounding,
                                                      const MatrixScale& matrix, std::uint32_t amax,
                                                      const Vec16<T>& vec) {
  const BlockScales scales = both_scales(rule, rounding, matrix, amax);
  if (amax == 0 || !is_finite(amax)) return scales.first;  // the errors are 0, or NaN
  Decision decision = {};
  if (takes_bound(scales, amax))
    decision =
        decide_by_bound<1>(matrix, scales, bit_cast<float>(amax), distances_of_vec(scales, vec));
  if (!decision.is_sure) {
    const Errors errors = errors_of_vec(matrix, scales, vec);
    decision.takes_second = takes_second(errors.first, errors.second);
  }
  return decision.takes_second ? scales.second : scales.first;
}

}  // namespace minifloat::cuda
