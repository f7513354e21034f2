// Activations against float64: every 331st float, and every bf16.
#include "minifloat/core/activation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace minifloat {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Returns the error in units in the last place of the larger of `exact` and `beside`.
double error_in_ulps(double value, double exact, double beside = 0) {
  int exponent = 0;
  std::frexp(std::max(std::fabs(exact), std::fabs(beside)), &exponent);
  return std::fabs(value - exact) / std::ldexp(1.0, std::max(exponent, -125) - 24);
}

// An activation in float64, and the two terms whose sum is its derivative.
struct Exact {
  double value, first, second;
  double derivative() const { return first + second; }
};
double exact_sigmoid(double z) {
  return z < 0 ? std::exp(z) / (1 + std::exp(z)) : 1 / (1 + std::exp(-z));
}
Exact exact_silu(double x) {
  const double s = exact_sigmoid(x);
  return {x * s, s, s * x * exact_sigmoid(-x)};
}
Exact exact_gelu(double x) {
  const double phi = std::erfc(-x / std::sqrt(2.0)) / 2;
  return {x * phi, phi, x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI)};
}
Exact exact_gelu_tanh(double x) {
  const double k = 2 * std::sqrt(2 / M_PI), s = exact_sigmoid(k * (x + 0.044715 * x * x * x)),
               rest = exact_sigmoid(-k * (x + 0.044715 * x * x * x));
  return {x * s, s, s * rest * x * k * (1 + 3 * 0.044715 * x * x)};
}

// Calls check(x) for many floats of a magnitude below 1000.
template <class Check>
void for_many_floats(Check check) {
  const auto visit = [&](std::uint64_t bits) {
    const float x = bit_cast<float>(static_cast<std::uint32_t>(bits));
    if (std::fabs(x) < 1000) check(x);
  };
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += 331) visit(bits);
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += 1 << 16) visit(bits);
}

struct Bounds {
  double value, derivative;  // units in the last place
};
// Requires the bounds, except where sigma or Phi is below 2^-125, and may be 0. The bound of a
// derivative is in units of its larger term, since their sum has a zero.
template <Activation kActivation>
void check_activation(Exact (*exact_of)(double), const Bounds& bounds) {
  for_many_floats([&](float x) {
    const Activated got = activate<kActivation>(x);
    const Exact want = exact_of(x);
    if (std::fabs(want.first) < 0x1p-125) {
      ASSERT_NEAR(got.value, 0, std::fabs(x) * 0x1p-125) << x;
      ASSERT_NEAR(got.derivative, 0, 0x1p-110) << x;
      return;
    }
    const double larger = std::max(std::fabs(want.first), std::fabs(want.second));
    ASSERT_LE(error_in_ulps(got.value, want.value), bounds.value) << x;
    ASSERT_LE(error_in_ulps(got.derivative, want.derivative(), larger), bounds.derivative) << x;
  });
}

TEST(Activation, Silu) { check_activation<Activation::kSilu>(exact_silu, {3, 4}); }
TEST(Activation, Gelu) { check_activation<Activation::kGelu>(exact_gelu, {6, 6}); }
TEST(Activation, GeluTanh) { check_activation<Activation::kGeluTanh>(exact_gelu_tanh, {3, 6}); }

template <Activation kActivation>
void check_ends() {
  EXPECT_EQ(activate<kActivation>(0.0f).value, 0);
  EXPECT_EQ(activate<kActivation>(0.0f).derivative, 0.5f);
  EXPECT_EQ(activate<kActivation>(kInf).value, kInf);
  EXPECT_EQ(activate<kActivation>(1e30f).value, 1e30f);
  EXPECT_EQ(activate<kActivation>(-1e30f).value, 0);
  for (const float nan : {std::nanf(""), -std::nanf("")}) {
    EXPECT_TRUE(std::isnan(activate<kActivation>(nan).value));
    EXPECT_TRUE(std::isnan(activate<kActivation>(nan).derivative));
  }
}
TEST(Activation, EndsOfTheRange) {
  check_ends<Activation::kSilu>();
  check_ends<Activation::kGelu>();
  check_ends<Activation::kGeluTanh>();
}

// In the range that no activation limits, the shorter form has the same bits.
template <Activation kActivation>
void check_in_range() {
  const auto bits = [](float x) { return bit_cast<std::uint32_t>(x); };
  const auto check = [&](float x) {
    if (!(std::fabs(x) < kActivationRange<kActivation>)) return;
    const Activated got = activate<kActivation, true>(x), want = activate<kActivation>(x);
    ASSERT_EQ(bits(got.value), bits(want.value)) << x;
    ASSERT_EQ(bits(got.derivative), bits(want.derivative)) << x;
  };
  for_many_floats(check);
  for (const float sign : {-1.0f, 1.0f})
    check(sign * std::nextafter(kActivationRange<kActivation>, 0.0f));
}
TEST(Activation, InRange) {
  check_in_range<Activation::kSilu>();
  check_in_range<Activation::kGelu>();
  check_in_range<Activation::kGeluTanh>();
}

}  // namespace
}  // namespace minifloat
