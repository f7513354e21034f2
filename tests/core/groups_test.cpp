// The search in a table of groups, against counting.
#include "minifloat/core/groups.h"

#include <gtest/gtest.h>

#include <vector>

namespace minifloat {
namespace {

TEST(GroupAt, FindsTheGroupOfEachPositionBetweenEmptyOnes) {
  const std::vector<int> sizes[] = {{1}, {3, 2}, {0, 4}, {4, 0}, {2, 0, 0, 1, 5}, {0, 0, 7, 0}};
  for (const std::vector<int>& of : sizes) {
    std::vector<std::int32_t> boundaries = {0};
    std::vector<int> group_of;
    for (std::size_t g = 0; g < of.size(); ++g) {
      group_of.insert(group_of.end(), static_cast<std::size_t>(of[g]), static_cast<int>(g));
      boundaries.push_back(boundaries.back() + of[g]);
    }
    for (std::size_t i = 0; i < group_of.size(); ++i)
      EXPECT_EQ(group_at(boundaries.data(), static_cast<int>(of.size()), static_cast<int>(i)),
                group_of[i])
          << "position " << i << " of " << of.size() << " groups";
  }
}

}  // namespace
}  // namespace minifloat
