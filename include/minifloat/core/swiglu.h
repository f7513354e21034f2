// SwiGLU with a weight for each row, and its gradients, in fp32.
//
//     h = a · sigmoid(a) · u · w                         without a limit
//     h = a · sigmoid(alpha · a) · (u + 1) · w           with a limit, as in gpt-oss:
//         a = min(gate, limit)    u = clamp(up, -limit, limit)
//
// Without a limit another activation may be in the place of a · sigmoid(a) (core/activation.h).
// Each operation below is one IEEE operation, in this order, so that every backend has the same
// bits. The gradient of w is a sum over columns, in an order that does not depend on threads:
//
//     partial[c % 256] += term of column c          c ascending
//     of each run of 8 partials: i + (i ^ 4), then ^ 2, then ^ 1
//     of the 32 runs: i + (i ^ 16), then ^ 8, ^ 4, ^ 2, ^ 1
#pragma once

#include <cstdint>

#include "minifloat/core/activation.h"
#include "minifloat/core/format.h"
#include "minifloat/core/host_device.h"

namespace minifloat {

inline constexpr int kSwiGluVec = 8;     // columns that a thread of a GPU takes at a time
inline constexpr int kSwiGluLanes = 32;  // runs of columns, one after the other
inline constexpr int kSwiGluPartials = kSwiGluVec * kSwiGluLanes;

// The form of SwiGLU. limit, alpha: where there is a limit.
struct SwiGluForm {
  float limit = 0;
  float alpha = 1;
};

// The two factors of h without the weight, and the first one's derivative.
struct SwiGluFactors {
  float first, second, derivative;
};

// kIsInRange: |gate| < kActivationRange<kActivation>
template <bool kHasLimit, Activation kActivation = Activation::kSilu, bool kIsInRange = false,
          class R = Reciprocal>
MINIFLOAT_HD SwiGluFactors swiglu_factors(float gate, float up, const SwiGluForm& form,
                                          R reciprocal = {}) {
  static_assert(!kHasLimit || kActivation == Activation::kSilu);
  if constexpr (kHasLimit) {
    const float a = gate > form.limit ? form.limit : gate;
    float u = up > form.limit ? form.limit : up;
    u = u < -form.limit ? -form.limit : u;
    const float scaled = form.alpha * a;
    const Sigmoid s = sigmoid(scaled, reciprocal);
    return {a * s.value, u + 1.0f, s.value * (1.0f + scaled * s.rest)};
  } else {
    const Activated a = activate<kActivation, kIsInRange>(gate, reciprocal);
    return {a.value, up, a.derivative};
  }
}

// Return h.
MINIFLOAT_HD float swiglu(const SwiGluFactors& f, float weight) {
  return f.first * f.second * weight;
}
template <bool kHasLimit, Activation kActivation = Activation::kSilu, bool kIsInRange = false,
          class R = Reciprocal>
MINIFLOAT_HD float swiglu(float gate, float up, float weight, const SwiGluForm& form,
                          R reciprocal = {}) {
  return swiglu(swiglu_factors<kHasLimit, kActivation, kIsInRange>(gate, up, form, reciprocal),
                weight);
}

// The gradients of gate and up, and the column's term of the weight's.
struct SwiGluGradient {
  float gate, up, weight;
};

// Without a limit.
MINIFLOAT_HD SwiGluGradient swiglu_gradient(const SwiGluFactors& f, float dh, float weight) {
  const float weighted = dh * weight;
  return {weighted * f.second * f.derivative, weighted * f.first, dh * f.first * f.second};
}
template <bool kHasLimit, Activation kActivation = Activation::kSilu, class R = Reciprocal>
MINIFLOAT_HD SwiGluGradient swiglu_gradient(float dh, float gate, float up, float weight,
                                            const SwiGluForm& form, R reciprocal = {}) {
  const SwiGluFactors f = swiglu_factors<kHasLimit, kActivation>(gate, up, form, reciprocal);
  SwiGluGradient d = swiglu_gradient(f, dh, weight);
  if constexpr (kHasLimit) {
    d.gate = gate > form.limit ? 0.0f : d.gate;
    d.up = up > form.limit || up < -form.limit ? 0.0f : d.up;
  }
  return d;
}

// Replaces each NaN by the one that every backend writes.
MINIFLOAT_HD float canonicalize_nan(float x) {
  return x != x ? bit_cast<float>(Float32::kNanBits) : x;
}

}  // namespace minifloat
