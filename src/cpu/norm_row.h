// The normalisation of one row, in runs of 4096 columns: each of the sums' partials has one term of
// a half of a unit in it. A header, so that a test can run the loops compiled for each vector unit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "minifloat/core/norm.h"
#include "minifloat/core/rounding.h"
#include "swiglu_row.h"
#include "targets.h"

namespace minifloat::cpu {

inline constexpr std::int64_t kNormColumns = std::int64_t{kNormUnit} * kNormUnits;  // of a run
using NormPartials = float[kNormUnits][kNormPartials];

MINIFLOAT_INLINE float rounded_to(const float*, float x) { return x; }
MINIFLOAT_INLINE float rounded_to(const std::uint16_t*, float x) { return round_to_bf16(x); }

// One row.
template <class T>
struct NormRow {
  const T* x;
  std::int64_t cols;
  const float *weight, *bias;
  float eps;
  T* y;  // null: the statistics alone
};

// Returns the sum of all partials, in the order of core/norm.h.   units: those with terms
MINIFLOAT_INLINE float sum_of_units(NormPartials& partial, std::int64_t units) {
  float of_unit[kNormUnits] = {};
  for (std::int64_t u = 0; u < units; ++u) {
    float* const p = partial[u];
    const float a = p[0] + p[4], b = p[1] + p[5], c = p[2] + p[6], d = p[3] + p[7];
    of_unit[u] = (a + c) + (b + d);
  }
  float of_run[kNormRuns];
  for (int run = 0; run < kNormRuns; ++run) {
    float* const p = of_unit + run * kNormLanes;
    for (int half = kNormLanes / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) p[i] += p[i + half];
    of_run[run] = p[0];
  }
  for (int half = kNormRuns / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) of_run[i] += of_run[i + half];
  return of_run[0];
}

// Returns Σ x, or Σ (x - mean)².
template <bool kSquares, class T>
MINIFLOAT_INLINE float sum_of_row(const T* x, std::int64_t cols, float mean) {
  constexpr std::int64_t kHalf = kNormPartials;
  const auto add = [&](float& to, float value) {
    if constexpr (kSquares)
      to = multiply_add(value - mean, value - mean, to);
    else
      to += value;
  };
  NormPartials partial = {};
  for (std::int64_t first = 0; first < cols; first += kNormColumns) {
    const std::int64_t count = std::min(kNormColumns, cols - first), units = count / kNormUnit;
    for (std::int64_t u = 0; u < units; ++u)
      for (std::int64_t half = 0; half < 2; ++half)
        for (std::int64_t i = 0; i < kHalf; ++i)
          add(partial[u][i], load_value(x + first + u * kNormUnit + half * kHalf + i));
    for (std::int64_t i = units * kNormUnit; i < count; ++i)
      add(partial[units][i % kHalf], load_value(x + first + i));
  }
  return sum_of_units(partial,
                      std::min<std::int64_t>((cols + kNormUnit - 1) / kNormUnit, kNormUnits));
}

template <NormKind kKind, class T>
MINIFLOAT_INLINE RowStatistics statistics_of(const T* x, std::int64_t cols, float eps) {
  RowStatistics row;
  const auto count = static_cast<float>(cols);
  if constexpr (kKind == NormKind::kLayer) row.mean = sum_of_row<false>(x, cols, 0.0f) / count;
  row.factor = norm_factor(sum_of_row<true>(x, cols, row.mean), count, eps);
  return row;
}

template <class T, NormKind kKind>
struct NormaliseRow {
  MINIFLOAT_INLINE static RowStatistics run(const NormRow<T>& row) {
    const RowStatistics found = statistics_of<kKind>(row.x, row.cols, row.eps);
    if (!row.y) return found;
    for (std::int64_t i = 0; i < row.cols; ++i)
      store_value(row.y + i, normalise<kKind>(
                                 load_value(row.x + i), found, row.weight[i], row.bias[i],
                                 [](float v) { return rounded_to(static_cast<T*>(nullptr), v); }));
    return found;
  }
};

}  // namespace minifloat::cpu
