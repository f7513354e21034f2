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

}  // namespace
}  // namespace minifloat
