// Activations and their derivatives, in fp32: SiLU, and GELU by erf and by tanh.
//
//     silu(x)      = x · sigmoid(x)
//     gelu(x)      = x · Phi(x)             Phi(x) = (1 + erf(x / sqrt 2)) / 2
//     gelu_tanh(x) = x · sigmoid(z(x))      z = 2 sqrt(2 / pi) (x + 0.044715 x³)
//
// Each operation below is one IEEE operation, in this order, so that every backend has the same
// bits.
#pragma once

#include <cstdint>

#include "minifloat/core/host_device.h"

namespace minifloat {

enum class Activation : std::uint8_t { kSilu, kGelu, kGeluTanh };

// Returns 1 / x for 1 <= x < 2^126.
struct Reciprocal {
  MINIFLOAT_HD float operator()(float x) const { return 1.0f / x; }
};

// Returns e^(x - low) for |x| <= 87 and a low part of x's last place, within 2 units in the last
// place: 2^n · p(r), x - low = n · ln 2 + r, p of degree 6.
MINIFLOAT_HD float exponential(float x, float low = 0.0f) {
  constexpr float kMagic = 0x1.8p23f;  // rounds to an integer, in the low bits
  constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;  // 15 bits, and the rest
  const float shifted = multiply_add(x, 0x1.715476p0f, kMagic);
  const float n = shifted - kMagic;
  float r = multiply_add(n, -kLn2High, x);
  r = multiply_add(n, -kLn2Low, r) - low;
  float p = multiply_add(0x1.6a23fp-10f, r, 0x1.123a0cp-7f);
  p = multiply_add(p, r, 0x1.5558f2p-5f);
  p = multiply_add(p, r, 0x1.555492p-3f);
  p = multiply_add(p, r, 0x1.fffffcp-2f);
  p = multiply_add(p, r, 1.0f);
  p = multiply_add(p, r, 1.0f);
  // The integer's bits move to the exponent; those of kMagic above them are shifted out.
  return bit_cast<float>(bit_cast<std::uint32_t>(p) + (bit_cast<std::uint32_t>(shifted) << 23));
}

struct Sigmoid {
  float value;
  float rest;  // 1 - value
};

// Returns sigmoid(z + low) within 3 units in the last place, and 0 up to -87, where it is below
// 2^-125. A NaN gives numbers.   kIsInRange: |z| < 87
template <bool kIsInRange = false, class R = Reciprocal>
MINIFLOAT_HD Sigmoid sigmoid(float z, R reciprocal = {}, float low = 0.0f) {
  constexpr float kRange = 87.0f;  // e^±87 is normal
  if constexpr (kIsInRange) {
    const float e = exponential(-z, low);
    const float value = reciprocal(1.0f + e);
    return {value, e * value};
  }
  const bool vanishes = !(z > -kRange);
  float x = vanishes ? kRange : -z;
  x = x > -kRange ? x : -kRange;
  const float e = exponential(x, low);
  const float value = reciprocal(1.0f + e);
  return {vanishes ? 0.0f : value, e * value};
}

// Returns x between -range and range. A NaN stays.
MINIFLOAT_HD float clamp_to_range(float x, float range) {
  const float below = x > range ? range : x;
  return below < -range ? -range : below;
}

// The bound on |x| below which an activation needs no clamp: kIsInRange may then be set.
template <Activation kActivation>
inline constexpr float kActivationRange = kActivation == Activation::kSilu   ? 87.0f
                                          : kActivation == Activation::kGelu ? 13.125f
                                                                             : 9.875f;

// An activation of x, and its derivative.   kIsInRange: x is in the range above
struct Activated {
  float value, derivative;
};

template <bool kIsInRange = false, class R = Reciprocal>
MINIFLOAT_HD Activated silu(float x, R reciprocal = {}) {
  const Sigmoid s = sigmoid<kIsInRange>(x, reciprocal);
  return {x * s.value, s.value * (1.0f + x * s.rest)};
}

// Phi(-a) = e^(-a²/2) · P(u) · q for a >= 0, q = 1 / (a + 2.5), u = 1 - 5 q, P of degree 9 with a
// relative error of 2^-26. Phi is 0 up to -13.19, where it is below 2^-129.
template <bool kIsInRange = false, class R = Reciprocal>
MINIFLOAT_HD Activated gelu(float x, R reciprocal = {}) {
  constexpr float kRange = 13.19f;  // its square is below 2 · 87
  const bool vanishes = !kIsInRange && !(x > -kRange);
  const float c = kIsInRange ? x : clamp_to_range(x, kRange), a = c < 0.0f ? -c : c;
  const float square = a * a, low = multiply_add(a, a, -square);
  const float e = exponential(-0.5f * square, 0.5f * low);
  const float q = reciprocal(a + 2.5f), u = multiply_add(-5.0f, q, 1.0f);
  float p = multiply_add(-0x1.46b432p-13f, u, -0x1.43330cp-12f);
  p = multiply_add(p, u, 0x1.66bc4ep-11f);
  p = multiply_add(p, u, 0x1.4a748ep-9f);
  p = multiply_add(p, u, -0x1.a3d050p-10f);
  p = multiply_add(p, u, -0x1.0c75bep-6f);
  p = multiply_add(p, u, 0x1.2ea5a0p-7f);
  p = multiply_add(p, u, 0x1.0e4f2ap-3f);
  p = multiply_add(p, u, -0x1.bc19c2p-2f);
  p = multiply_add(p, u, 0x1.69cee6p-1f);
  const float tail = vanishes ? 0.0f : p * q * e;
  const float phi = c > 0.0f ? 1.0f - tail : tail;
  return {x * phi, phi + c * (e * 0x1.988454p-2f)};  // 1 / sqrt(2 pi)
}

// Computes z as a sum of two floats, because a relative error of z becomes z times as large in e^z.
// The constants are sums of two floats for the same reason.
template <bool kIsInRange = false, class R = Reciprocal>
MINIFLOAT_HD Activated gelu_tanh(float x, R reciprocal = {}) {
  constexpr float kRange = 10.5f;  // z is past 87
  constexpr float kLinear = 0x1.98845p0f, kLinearLow = 0x1.9ea1b2p-23f;
  constexpr float kCubic = 0x1.2444f2p-4f, kCubicLow = 0x1.49b16ap-29f;
  const float c = kIsInRange ? x : clamp_to_range(x, kRange);
  const float t = c * c, t_low = multiply_add(c, c, -t);
  const float p = multiply_add(kCubic, t, kLinear);
  const float p_low = multiply_add(kCubic, t, kLinear - p) +
                      multiply_add(kCubic, t_low, multiply_add(kCubicLow, t, kLinearLow));
  const float z = c * p, z_low = multiply_add(c, p_low, multiply_add(c, p, -z));
  const Sigmoid s = sigmoid<kIsInRange>(z, reciprocal, z_low);
  const float slope = multiply_add(0x1.b6676cp-3f, t, kLinear);
  return {x * s.value, s.value * (1.0f + c * slope * s.rest)};
}

template <Activation kActivation, bool kIsInRange = false, class R = Reciprocal>
MINIFLOAT_HD Activated activate(float x, R reciprocal = {}) {
  if constexpr (kActivation == Activation::kGelu)
    return gelu<kIsInRange>(x, reciprocal);
  else if constexpr (kActivation == Activation::kGeluTanh)
    return gelu_tanh<kIsInRange>(x, reciprocal);
  else
    return silu<kIsInRange>(x, reciprocal);
}

}  // namespace minifloat
