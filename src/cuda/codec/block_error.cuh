// The choice of a rule that reads values (core/scale_rule.h): which of a block's two scales has the smaller error.
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

template <class T>
__device__ __forceinline__ float error_of_any(const MatrixScale& matrix, const BlockScale& block,
                                              const Unit<T>& unit) {
  float v[kUnit], sum = 0.0f;  // indexed by a loop that need not be unrolled
#pragma unroll
  for (int i = 0; i < kUnit; ++i) v[i] = unit[i];
#pragma unroll 1
  for (int i = 0; i < kUnit; ++i)
    sum = sum + squared_error<E2M1>(matrix, block.scale, encode<E2M1>(v[i] * block.encode), v[i]);
  return sum;
}

// The errors of a unit of a block under the block's two scales.
struct UnitErrors {
  float first, second;
};
template <class T>
__device__ __forceinline__ UnitErrors errors_of_unit(const MatrixScale& matrix,
                                                     const BlockScales& scales,
                                                     const Unit<T>& unit) {
  return {error_of_any(matrix, scales.first, unit), error_of_any(matrix, scales.second, unit)};
}

// The scale of a block that is one unit.
template <class T>
__device__ __forceinline__ BlockScale scale_by_values(ScaleRule rule, ScaleRounding rounding,
                                                      const MatrixScale& matrix, std::uint32_t amax,
                                                      const Unit<T>& unit) {
  const BlockScales scales = both_scales(rule, rounding, matrix, amax);
  if (amax == 0 || !is_finite(amax)) return scales.first;  // the errors are 0, or NaN
  const UnitErrors errors = errors_of_unit(matrix, scales, unit);
  return takes_second(errors.first, errors.second) ? scales.second : scales.first;
}

}  // namespace minifloat::cuda
