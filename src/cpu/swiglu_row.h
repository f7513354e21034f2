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
MINIFLOAT_INLINE void store_value(float* at, float x) { *at = canonicalize_nan(x); }
MINIFLOAT_INLINE void store_value(std::uint16_t* at, float x) {
  *at = static_cast<std::uint16_t>(encode_bf16(x));
}

// One row of a SwiGLU. up: null: ones; d_up: null: not written.
template <class T>
struct SwiGluRow {
  const T *gate, *up, *dh;
  std::int64_t width;
  float weight;
  SwiGluForm form;
  T *h, *d_gate, *d_up;
};

template <int kStep, class T>
MINIFLOAT_INLINE void load_run(const T* from, std::int64_t first, std::int64_t count,
                               RunValues& to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = load_value(from + (first + i) * kStep);
}
template <int kStep, class T>
MINIFLOAT_INLINE void load_run_or_ones(const T* from, std::int64_t first, std::int64_t count,
                                       RunValues& to) {
  if (from) return load_run<kStep>(from, first, count, to);
  for (std::int64_t i = 0; i < count; ++i) to[i] = 1.0f;
}

// Columns are kStep elements apart.
template <class T, bool kHasLimit, int kStep, Activation kActivation = Activation::kSilu>
struct SwiGluForward {
  MINIFLOAT_INLINE static void run(const SwiGluRow<T>& row) {
    for (std::int64_t first = 0; first < row.width; first += kRunColumns) {
      const std::int64_t count = std::min(kRunColumns, row.width - first);
      RunValues gate, up;
      load_run<kStep>(row.gate, first, count, gate);
      load_run_or_ones<kStep>(row.up, first, count, up);
      for (std::int64_t i = 0; i < count; ++i)
        gate[i] = minifloat::swiglu<kHasLimit, kActivation>(gate[i], up[i], row.weight, row.form);
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

template <class T, bool kHasLimit, int kStep, Activation kActivation = Activation::kSilu>
struct SwiGluBackward {
  MINIFLOAT_INLINE static float run(const SwiGluRow<T>& row) {
    RunValues partial = {};
    for (std::int64_t first = 0; first < row.width; first += kRunColumns) {
      const std::int64_t count = std::min(kRunColumns, row.width - first);
      RunValues gate, up, dh;
      load_run<kStep>(row.gate, first, count, gate);
      load_run_or_ones<kStep>(row.up, first, count, up);
      load_run<1>(row.dh, first, count, dh);
      for (std::int64_t i = 0; i < count; ++i) {
        const SwiGluGradient d =
            swiglu_gradient<kHasLimit, kActivation>(dh[i], gate[i], up[i], row.weight, row.form);
        gate[i] = d.gate;
        up[i] = d.up;
        partial[i] += d.weight;
      }
      for (std::int64_t i = 0; i < count; ++i)
        store_value(row.d_gate + (first + i) * kStep, gate[i]);
      if (!row.d_up) continue;
      for (std::int64_t i = 0; i < count; ++i) store_value(row.d_up + (first + i) * kStep, up[i]);
    }
    return canonicalize_nan(sum_of_partials(partial));
  }
};

}  // namespace minifloat::cpu
