#include "minifloat/core/amax_history.h"

#include <limits>
#include <vector>

#include "harness.h"

namespace minifloat {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<float> rolled(std::vector<float> row, DelayedAmax algorithm, int margin) {
  roll_amax_history(row.data(), static_cast<int>(row.size()) - 1, algorithm, margin);
  return row;
}

TEST(AmaxHistory, ANewStepBegins) {
  EXPECT_EQ(rolled({1, 2, 7, 3}, DelayedAmax::kMax, 0), (std::vector<float>{7, 0, 2, 7}));
  EXPECT_EQ(rolled({1, 2, 7, 3}, DelayedAmax::kMostRecent, 1), (std::vector<float>{4, 0, 2, 7}));
}

TEST(AmaxHistory, OfOneStep) {
  EXPECT_EQ(rolled({1, 2}, DelayedAmax::kMax, 0), (std::vector<float>{2, 0}));
  EXPECT_EQ(rolled({1, 0}, DelayedAmax::kMax, 3), (std::vector<float>{1, 0}));
}

TEST(AmaxHistory, InfStaysInTheHistoryAndOutOfTheActiveAmax) {
  EXPECT_EQ(rolled({5, kInf, 0}, DelayedAmax::kMax, 0), (std::vector<float>{5, 0, kInf}));
}

TEST(AmaxHistory, TheLargerAmaxIsNanIfOneIs) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(larger_amax(0.0f, 1e-40f), 1e-40f);
  EXPECT_EQ(larger_amax(2.0f, 1.0f), 2.0f);
  EXPECT_EQ(larger_amax(2.0f, kInf), kInf);
  EXPECT_TRUE(larger_amax(kInf, nan) != larger_amax(kInf, nan));
  EXPECT_TRUE(larger_amax(nan, kInf) != larger_amax(nan, kInf));
}

}  // namespace
}  // namespace minifloat
