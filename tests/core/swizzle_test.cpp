// The swizzled scale layout: the formula against a walk that writes tiles in order and never
// divides.
#include "minifloat/core/swizzle.h"

#include <gtest/gtest.h>

#include <vector>

namespace minifloat {
namespace {

struct Shape {
  std::int64_t rows, cols;
};
constexpr Shape kShapes[] = {{1, 1},    {1, 4},   {1, 5},    {31, 3},   {32, 4},  {33, 4},
                             {127, 9},  {128, 4}, {128, 8},  {129, 1},  {129, 5}, {256, 12},
                             {300, 17}, {512, 3}, {1000, 7}, {128, 64}, {640, 33}};

// Visits the bytes in the order of memory: tile by tile; in a tile 32 rows of 16 bytes; in such a
// row the 4 scale columns of 4 matrix rows that lie 32 apart.
template <class Visit>
void walk_tiles(Shape shape, Visit visit) {
  std::int64_t offset = 0;
  for (std::int64_t tile_row = 0; tile_row < shape.rows; tile_row += 128)
    for (std::int64_t tile_col = 0; tile_col < shape.cols; tile_col += 4)
      for (int line = 0; line < 32; ++line)
        for (int quarter = 0; quarter < 4; ++quarter)
          for (int c = 0; c < 4; ++c) visit(offset++, tile_row + quarter * 32 + line, tile_col + c);
}

TEST(Swizzle, FormulaFollowsTheWalk) {
  for (const Shape shape : kShapes) {
    std::int64_t bytes = 0, inside = 0, wrong = 0;
    walk_tiles(shape, [&](std::int64_t offset, std::int64_t r, std::int64_t c) {
      ++bytes;
      if (r >= shape.rows || c >= shape.cols) return;  // padding
      ++inside;
      wrong += swizzled_offset(r, c, shape.cols) != offset;
    });
    EXPECT_EQ(wrong, 0) << shape.rows << " x " << shape.cols;
    EXPECT_EQ(inside, shape.rows * shape.cols) << "every scale has exactly one place";
    EXPECT_EQ(bytes, swizzled_size(shape.rows, shape.cols)) << shape.rows << " x " << shape.cols;
  }
}

// Points of the figure in cuBLAS's documentation: 16-byte lines, four rows 32 apart in a line.
TEST(Swizzle, OfPointsWorkedByHand) {
  EXPECT_EQ(swizzled_offset(0, 0, 8), 0);
  EXPECT_EQ(swizzled_offset(0, 3, 8), 3);
  EXPECT_EQ(swizzled_offset(32, 0, 8), 4);
  EXPECT_EQ(swizzled_offset(96, 3, 8), 15);
  EXPECT_EQ(swizzled_offset(1, 0, 8), 16);
  EXPECT_EQ(swizzled_offset(127, 3, 8), 511);
  EXPECT_EQ(swizzled_offset(0, 4, 8), 512);          // the next tile to the right
  EXPECT_EQ(swizzled_offset(128, 0, 8), 1024);       // two tiles a row
  EXPECT_EQ(swizzled_offset(129, 5, 5), 1536 + 17);  // columns round up to two tiles
}

TEST(Swizzle, SizesOfEmptyMatrices) {
  EXPECT_EQ(swizzled_size(0, 7), 0);
  EXPECT_EQ(swizzled_size(7, 0), 0);
}

// Groups of a matrix, each laid out alone at its base: tiles follow each other without gap or
// overlap, start on whole tiles, and fit in the bytes that are computed without the groups' sizes.
void expect_packed(const std::vector<Shape>& groups, const std::vector<std::int64_t>& bases,
                   std::int64_t bound) {
  std::int64_t next = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    EXPECT_EQ(bases[g], next) << "group " << g;
    EXPECT_EQ(bases[g] % 512, 0) << "group " << g;
    std::int64_t wrong = 0;
    walk_tiles(groups[g], [&](std::int64_t offset, std::int64_t r, std::int64_t c) {
      next = bases[g] + offset + 1;
      if (r < groups[g].rows && c < groups[g].cols)
        wrong += swizzled_offset(r, c, groups[g].cols) != offset;
    });
    EXPECT_EQ(wrong, 0) << "group " << g;
  }
  EXPECT_LE(next, bound);
}

const std::vector<std::vector<std::int64_t>> kGroups = {
    {1}, {0, 0}, {128, 256}, {1, 1, 1, 1}, {5, 0, 130, 128, 0, 7}, {0, 33, 127, 129, 4}};

TEST(SwizzleGroups, AlongMStandBelowEachOther) {
  for (const std::int64_t cols : {1, 4, 6, 16})
    for (const auto& sizes : kGroups) {
      std::vector<Shape> groups;
      std::vector<std::int64_t> bases;
      std::int64_t rows = 0, padded_rows = 0;
      for (const std::int64_t m : sizes) {
        groups.push_back({m, cols});
        bases.push_back(padded_rows * round_up(cols, kSwizzleTileCols));
        rows += m;
        padded_rows += round_up(m, kSwizzleTileRows);
      }
      expect_packed(groups, bases, swizzled_size_groups_m(rows, cols, std::ssize(sizes)));
    }
}

TEST(SwizzleGroups, AlongKStandBesideEachOtherAndRestartTheirTiles) {
  for (const std::int64_t rows : {1, 128, 200})
    for (const auto& sizes : kGroups) {
      std::vector<Shape> groups;
      std::vector<std::int64_t> bases;
      std::int64_t cols = 0, padded_cols = 0;
      for (const std::int64_t k : sizes) {
        groups.push_back({rows, k});
        bases.push_back(padded_cols * round_up(rows, kSwizzleTileRows));
        cols += k;
        padded_cols += round_up(k, kSwizzleTileCols);
      }
      expect_packed(groups, bases, swizzled_size_groups_k(rows, cols, std::ssize(sizes)));
    }
}

}  // namespace
}  // namespace minifloat
