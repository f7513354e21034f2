// SwiGLU against float64: the sigmoid of every 331st float, the factors and gradients of a grid.
#include "minifloat/core/swiglu.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace minifloat {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Returns the error in units in the last place of the exact value.
double error_in_ulps(double value, double exact) {
  int exponent = 0;
  std::frexp(exact, &exponent);
  return std::fabs(value - exact) / std::ldexp(1.0, std::max(exponent, -125) - 24);
}
double exact_sigmoid(double z) { return 1 / (1 + std::exp(-z)); }

TEST(SwiGlu, SigmoidIsWithinThreeUlps) {
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += 331) {
    const float z = bit_cast<float>(static_cast<std::uint32_t>(bits));
    if (!(std::fabs(z) < 1000)) continue;
    const Sigmoid s = sigmoid(z);
    if (z <= -87) {
      ASSERT_EQ(s.value, 0) << z;
      continue;
    }
    ASSERT_LE(error_in_ulps(s.value, exact_sigmoid(z)), 3) << z;
    if (z < 87) {
      ASSERT_LE(error_in_ulps(s.rest, exact_sigmoid(-static_cast<double>(z))), 3) << z;
    }
  }
}

TEST(SwiGlu, EndsOfTheRange) {
  EXPECT_EQ(sigmoid(0.0f).value, 0.5f);
  EXPECT_EQ(sigmoid(kInf).value, 1);
  EXPECT_EQ(sigmoid(-kInf).value, 0);
  EXPECT_EQ(sigmoid(100.0f).value, 1);
  EXPECT_EQ(swiglu<false>(kInf, 1, 1, {}), kInf);
  EXPECT_EQ(swiglu<false>(-1000, 1, 1, {}), 0);
  for (const float nan : {std::nanf(""), -std::nanf("")}) {
    EXPECT_TRUE(std::isnan(swiglu<false>(nan, 1, 1, {})));
    EXPECT_TRUE(std::isnan(swiglu<false>(1, nan, 1, {})));
    EXPECT_TRUE(std::isnan(swiglu<true>(nan, 1, 1, {7, 1.702f})));
    EXPECT_TRUE(std::isnan(swiglu<true>(1, nan, 1, {7, 1.702f})));
    EXPECT_TRUE(std::isnan(swiglu_gradient<true>(1, nan, 1, 1, {7, 1.702f}).gate));
    EXPECT_EQ(bit_cast<std::uint32_t>(canonicalize_nan(nan)), Float32::kNanBits);
  }
}

// h, and its gradients by differences of the exact function.
double exact(double gate, double up, double weight, const SwiGluForm* limited) {
  if (!limited) return gate * exact_sigmoid(gate) * up * weight;
  const double limit = limited->limit, alpha = limited->alpha;
  const double a = std::min(gate, limit), u = std::clamp(up, -limit, limit);
  return a * exact_sigmoid(alpha * a) * (u + 1) * weight;
}

template <bool kHasLimit>
void check_grid(const SwiGluForm& form) {
  const SwiGluForm* const limited = kHasLimit ? &form : nullptr;
  const double step = 1e-5, weight = 0.75, dh = -1.5;
  for (float gate = -20.03f; gate < 20; gate += 0.61f)
    for (float up = -9.07f; up < 9; up += 0.43f) {
      const double want = exact(gate, up, weight, limited);
      const double scale = std::fabs(want) + 1e-6;
      ASSERT_NEAR(swiglu<kHasLimit>(gate, up, 0.75f, form), want, scale * 1e-6) << gate << up;
      const SwiGluGradient d = swiglu_gradient<kHasLimit>(-1.5f, gate, up, 0.75f, form);
      const auto slope = [&](double g, double u, double w) {
        return dh *
               (exact(gate + g, up + u, weight + w, limited) -
                exact(gate - g, up - u, weight - w, limited)) /
               (2 * step);
      };
      ASSERT_NEAR(d.gate, slope(step, 0, 0), 1e-4 * (1 + std::fabs(d.gate))) << gate << up;
      ASSERT_NEAR(d.up, slope(0, step, 0), 1e-4 * (1 + std::fabs(d.up))) << gate << up;
      ASSERT_NEAR(d.weight, slope(0, 0, step), 1e-4 * (1 + std::fabs(d.weight))) << gate << up;
    }
}

TEST(SwiGlu, ValuesAndGradients) {
  check_grid<false>({});
  check_grid<true>({7, 1.702f});
  check_grid<true>({2.5f, 1});
}

TEST(SwiGlu, ALimitEndsTheGradients) {
  const SwiGluForm form = {2, 1};
  EXPECT_EQ((swiglu_gradient<true>(1, 2.5f, 0, 1, form).gate), 0);
  EXPECT_NE((swiglu_gradient<true>(1, 2, 0, 1, form).gate), 0);
  EXPECT_NE((swiglu_gradient<true>(1, -9, 0, 1, form).gate), 0);
  for (const float up : {2.5f, -2.5f}) EXPECT_EQ((swiglu_gradient<true>(1, 1, up, 1, form).up), 0);
  for (const float up : {2.0f, -2.0f}) EXPECT_NE((swiglu_gradient<true>(1, 1, up, 1, form).up), 0);
}

}  // namespace
}  // namespace minifloat
