// SwiGLU with a weight for each row, and its gradients, in fp32.
//
//     h = a · sigmoid(a) · u · w                         without a limit
//     h = a · sigmoid(alpha · a) · (u + 1) · w           with a limit, as in gpt-oss:
//         a = min(gate, limit)    u = clamp(up, -limit, limit)
//
// Each operation below is one IEEE operation, in this order, so that every backend has the same
// bits. The gradient of w is a sum over columns, in an order that does not depend on threads:
//
//     partial[c % 256] += term of column c          c ascending
//     of each run of 8 partials: i + (i ^ 4), then ^ 2, then ^ 1
//     of the 32 runs: i + (i ^ 16), then ^ 8, ^ 4, ^ 2, ^ 1
#pragma once

#include <cstdint>

#include "minifloat/core/format.h"
#include "minifloat/core/host_device.h"

namespace minifloat {

inline constexpr int kSwiGluVec = 8;     // columns that a thread of a GPU takes at a time
inline constexpr int kSwiGluLanes = 32;  // runs of columns, one after the other
inline constexpr int kSwiGluPartials = kSwiGluVec * kSwiGluLanes;

// a * b + c, rounded once.
MINIFLOAT_HD float multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

// Returns 1 / x for 1 <= x < 2^126.
struct Reciprocal {
  MINIFLOAT_HD float operator()(float x) const { return 1.0f / x; }
};

struct Sigmoid {
  float value;
  float rest;  // 1 - value
};

// Returns sigmoid(z) within 3 units in the last place, and 0 up to -87, where it is below 2^-125.
// The exponential is 2^n · p(r), -z = n · ln 2 + r, p of degree 6. A NaN gives numbers.
template <class R = Reciprocal>
MINIFLOAT_HD Sigmoid sigmoid(float z, R reciprocal = {}) {
  constexpr float kRange = 87.0f;      // e^±87 is normal
  constexpr float kMagic = 0x1.8p23f;  // rounds to an integer, in the low bits
  constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;  // 15 bits, and the rest
  const bool vanishes = !(z > -kRange);
  float x = vanishes ? kRange : -z;
  x = x > -kRange ? x : -kRange;
  const float shifted = multiply_add(x, 0x1.715476p0f, kMagic);
  const float n = shifted - kMagic;
  float r = multiply_add(n, -kLn2High, x);
  r = multiply_add(n, -kLn2Low, r);
  float p = multiply_add(0x1.6a23fp-10f, r, 0x1.123a0cp-7f);
  p = multiply_add(p, r, 0x1.5558f2p-5f);
  p = multiply_add(p, r, 0x1.555492p-3f);
  p = multiply_add(p, r, 0x1.fffffcp-2f);
  p = multiply_add(p, r, 1.0f);
  p = multiply_add(p, r, 1.0f);
  // The integer's bits move to the exponent; those of kMagic above them are shifted out.
  const float e =
      bit_cast<float>(bit_cast<std::uint32_t>(p) + (bit_cast<std::uint32_t>(shifted) << 23));
  const float value = reciprocal(1.0f + e);
  return {vanishes ? 0.0f : value, e * value};
}

// The form of SwiGLU. limit, alpha: where there is a limit.
struct SwiGluForm {
  float limit = 0;
  float alpha = 1;
};

// The two factors of h without the weight, and the first one's derivative.
struct SwiGluFactors {
  float first, second, derivative;
};

template <bool kHasLimit, class R = Reciprocal>
MINIFLOAT_HD SwiGluFactors swiglu_factors(float gate, float up, const SwiGluForm& form,
                                          R reciprocal = {}) {
  if constexpr (kHasLimit) {
    const float a = gate > form.limit ? form.limit : gate;
    float u = up > form.limit ? form.limit : up;
    u = u < -form.limit ? -form.limit : u;
    const float scaled = form.alpha * a;
    const Sigmoid s = sigmoid(scaled, reciprocal);
    return {a * s.value, u + 1.0f, s.value * (1.0f + scaled * s.rest)};
  } else {
    const Sigmoid s = sigmoid(gate, reciprocal);
    return {gate * s.value, up, s.value * (1.0f + gate * s.rest)};
  }
}

// Returns h.
template <bool kHasLimit, class R = Reciprocal>
MINIFLOAT_HD float swiglu(float gate, float up, float weight, const SwiGluForm& form,
                          R reciprocal = {}) {
  const SwiGluFactors f = swiglu_factors<kHasLimit>(gate, up, form, reciprocal);
  return f.first * f.second * weight;
}

// The gradients of gate and up, and the column's term of the weight's.
struct SwiGluGradient {
  float gate, up, weight;
};

template <bool kHasLimit, class R = Reciprocal>
MINIFLOAT_HD SwiGluGradient swiglu_gradient(float dh, float gate, float up, float weight,
                                            const SwiGluForm& form, R reciprocal = {}) {
  const SwiGluFactors f = swiglu_factors<kHasLimit>(gate, up, form, reciprocal);
  const float weighted = dh * weight;
  SwiGluGradient d = {weighted * f.second * f.derivative, weighted * f.first,
                      dh * f.first * f.second};
  if constexpr (kHasLimit) {
    d.gate = gate > form.limit ? 0.0f : d.gate;
    d.up = up > form.limit || up < -form.limit ? 0.0f : d.up;
  }
  return d;
}

// Replaces each NaN by the one that every backend writes.
MINIFLOAT_HD float with_one_nan(float x) { return x != x ? bit_cast<float>(Float32::kNanBits) : x; }

}  // namespace minifloat
