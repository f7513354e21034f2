// The factor of a normalised row at the ends of the range, and where each kind rounds.
#include "minifloat/core/norm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "minifloat/core/rounding.h"

namespace minifloat {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(Norm, FactorsOfTheEnds) {
  EXPECT_EQ(norm_factor(16, 4, 0), 0.5f);
  EXPECT_EQ(norm_factor(0, 4, 0), kInf);
  EXPECT_EQ(norm_factor(0, 4, 0.25f), 2);
  EXPECT_EQ(norm_factor(kInf, 4, 0), 0);
  EXPECT_TRUE(std::isnan(norm_factor(std::nanf(""), 4, 1)));
}

TEST(Norm, EachKindRoundsWhereItSays) {
  const auto to_bf16 = [](float x) { return round_to_bf16(x); };
  const RowStatistics row = {0.5f, 0.7f};
  const float x = 1.234567f, w = 1.111111f, b = -0.25f;
  EXPECT_EQ(normalise<NormKind::kRms>(x, row, w, -0.0f, to_bf16), x * 0.7f * w);
  EXPECT_EQ(normalise<NormKind::kRmsRounded>(x, row, w, -0.0f, to_bf16),
            round_to_bf16(x * 0.7f) * w);
  EXPECT_EQ(normalise<NormKind::kLayer>(x, row, w, b, to_bf16), std::fma((x - 0.5f) * 0.7f, w, b));
  // No bias: -0 changes no value, and no zero's sign.
  for (const float v : {0.5f, 3.0f, -0.75f}) {
    const float alone = (v - 0.5f) * 0.7f * w;
    EXPECT_EQ(bit_cast<std::uint32_t>(normalise<NormKind::kLayer>(v, row, w, -0.0f, to_bf16)),
              bit_cast<std::uint32_t>(alone));
  }
}

}  // namespace
}  // namespace minifloat
