// The normalisation of a row in fp32: RMSNorm and LayerNorm.
//
//     kRms          y = (x · r) · w                     r = 1 / √(Σ x² / D + ε)
//     kRmsRounded   y = round(x · r) · w                rounded to x's dtype
//     kLayer        y = ((x - m) · r) · w + b           m = Σ x / D,  r = 1 / √(Σ (x - m)² / D + ε)
//
// Each operation below is one IEEE operation, in this order, so that every backend has the same
// bits. A sum over columns has an order that does not depend on threads:
//
//     partial[c / 16 % 256][c % 8] += term of column c          c ascending
//     of the 8 of a unit of 16 columns: i + (i ^ 4), then ^ 2, then ^ 1
//     of each run of 32 units: i + (i ^ 16), then ^ 8, ^ 4, ^ 2, ^ 1
//     of the 8 runs: i + (i ^ 4), then ^ 2, ^ 1
//
// A square is added by one multiply-add. An absent weight is 1, an absent bias -0.
#pragma once

#include <cstdint>

#include "minifloat/core/host_device.h"
#include "minifloat/core/swiglu.h"

namespace minifloat {

enum class NormKind : std::uint8_t { kRms, kRmsRounded, kLayer };

inline constexpr int kNormUnit = 16;     // columns that a thread of a GPU takes at a time
inline constexpr int kNormUnits = 256;   // threads of a block, which holds a row
inline constexpr int kNormPartials = 8;  // of a unit
inline constexpr int kNormLanes = 32;
inline constexpr int kNormRuns = kNormUnits / kNormLanes;

// Returns 1 / √(sum / cols + eps).
MINIFLOAT_HD float norm_factor(float sum, float cols, float eps) {
#if defined(__CUDA_ARCH__)
  return __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(sum, cols), eps)));
#else
  return 1.0f / __builtin_sqrtf(sum / cols + eps);
#endif
}

// The mean of a row, zero under RMSNorm, and its factor.
struct RowStatistics {
  float mean = 0, factor = 0;
};

// Returns x normalised, before the last rounding.   round: rounds to x's dtype
template <NormKind kKind, class Round>
MINIFLOAT_HD float normalise(float x, const RowStatistics& row, float weight, float bias,
                             Round round) {
  if constexpr (kKind == NormKind::kRms) return x * row.factor * weight;
  if constexpr (kKind == NormKind::kRmsRounded) return round(x * row.factor) * weight;
  return multiply_add((x - row.mean) * row.factor, weight, bias);
}

}  // namespace minifloat
