// SwiGLU of one row, and its gradient, in runs of 256 columns. A header, so that a test can run the
// loops compiled for each vector unit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "minifloat/core/rounding.h"
#include "minifloat/core/swiglu.h"
#include "targets.h"

namespace minifloat::cpu {

inline constexpr std::int64_t kRunColumns = kSwiGluPartials;
using RunValues = float[kRunColumns];

MINIFLOAT_INLINE float load_value(const float* at) { return *at; }
MINIFLOAT_INLINE float load_value(const std::uint16_t* at) { return decode_bf16(*at); }
MINIFLOAT_INLINE void store_value(float* at, float x) { *at = with_one_nan(x); }
MINIFLOAT_INLINE void store_value(std::uint16_t* at, float x) {
  *at = static_cast<std::uint16_t>(encode_bf16(x));
}

// One row of a SwiGLU.
template <class T>
struct SwiGluRow {
  const T *gate, *up, *dh;
  std::int64_t width;
  float weight;
  SwiGluForm form;
  T *h, *d_gate, *d_up;
};

// Columns are kStep elements apart.
template <class T, bool kHasLimit, int kStep>
struct SwiGluForward {
  MINIFLOAT_INLINE static void run(const SwiGluRow<T>& row) {
    for (std::int64_t first = 0; first < row.width; first += kRunColumns) {
      const std::int64_t count = std::min(kRunColumns, row.width - first);
      RunValues gate, up;
      for (std::int64_t i = 0; i < count; ++i) gate[i] = load_value(row.gate + (first + i) * kStep);
      for (std::int64_t i = 0; i < count; ++i) up[i] = load_value(row.up + (first + i) * kStep);
      for (std::int64_t i = 0; i < count; ++i)
        gate[i] = minifloat::swiglu<kHasLimit>(gate[i], up[i], row.weight, row.form);
      for (std::int64_t i = 0; i < count; ++i) store_value(row.h + first + i, gate[i]);
    }
  }
};

// Returns the sum of a row's terms, in the order of core/swiglu.h.
MINIFLOAT_INLINE float sum_of_partials(RunValues& partial) {
  for (int lane = 0; lane < kSwiGluLanes; ++lane)
    for (int half = kSwiGluVec / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i)
        partial[lane * kSwiGluVec + i] += partial[lane * kSwiGluVec + i + half];
  for (int half = kSwiGluLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane)
      partial[lane * kSwiGluVec] += partial[(lane + half) * kSwiGluVec];
  return partial[0];
}

template <class T, bool kHasLimit, int kStep>
struct SwiGluBackward {
  MINIFLOAT_INLINE static float run(const SwiGluRow<T>& row) {
    RunValues partial = {};
    for (std::int64_t first = 0; first < row.width; first += kRunColumns) {
      const std::int64_t count = std::min(kRunColumns, row.width - first);
      RunValues gate, up, dh;
      for (std::int64_t i = 0; i < count; ++i) gate[i] = load_value(row.gate + (first + i) * kStep);
      for (std::int64_t i = 0; i < count; ++i) up[i] = load_value(row.up + (first + i) * kStep);
      for (std::int64_t i = 0; i < count; ++i) dh[i] = load_value(row.dh + first + i);
      for (std::int64_t i = 0; i < count; ++i) {
        const SwiGluGradient d =
            swiglu_gradient<kHasLimit>(dh[i], gate[i], up[i], row.weight, row.form);
        gate[i] = d.gate;
        up[i] = d.up;
        partial[i] += d.weight;
      }
      for (std::int64_t i = 0; i < count; ++i)
        store_value(row.d_gate + (first + i) * kStep, gate[i]);
      for (std::int64_t i = 0; i < count; ++i) store_value(row.d_up + (first + i) * kStep, up[i]);
    }
    return with_one_nan(sum_of_partials(partial));
  }
};

}  // namespace minifloat::cpu
