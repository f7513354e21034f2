// Shard geometry against brute force: every element of the flat range is visited, and the bytes and
// blocks that it touches are marked.
#include "minifloat/core/shard.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace minifloat {
namespace {

struct Case {
  std::int64_t rows, cols, begin, end;
  std::string str() const {
    return std::to_string(rows) + " x " + std::to_string(cols) + ", [" + std::to_string(begin) +
           ", " + std::to_string(end) + ")";
  }
  FlatShard shard() const { return {cols, {begin, end}}; }
};

// Visits all ranges of small weights, odd widths among them, and some of a large one.
template <class Visit>
void for_cases(Visit visit) {
  for (const std::int64_t rows : {1, 2, 3, 5})
    for (const std::int64_t cols : {1, 2, 3, 4, 7, 8, 9})
      for (std::int64_t begin = 0; begin <= rows * cols; ++begin)
        for (std::int64_t end = begin; end <= rows * cols; ++end)
          visit(Case{rows, cols, begin, end});
  for (const std::int64_t cols : {33, 48, 129})
    for (const std::int64_t begin : {0, 1, 47, 48, 527, 1000})
      for (const std::int64_t size : {0, 1, 15, 16, 17, 129, 700})
        visit(Case{40, cols, begin, std::min(begin + size, 40 * cols)});
}

TEST(FlatShard, RowsAndColumnsHoldExactlyTheRange) {
  for_cases([](const Case& c) {
    const FlatShard shard = c.shard();
    std::set<std::int64_t> rows;
    for (std::int64_t i = c.begin; i < c.end; ++i) rows.insert(i / c.cols);
    ASSERT_EQ(shard.rows().size(), static_cast<std::int64_t>(rows.size())) << c.str();
    ASSERT_EQ(shard.rows().begin, rows.empty() ? 0 : *rows.begin()) << c.str();

    for (std::int64_t r = 0; r < c.rows; ++r) {
      const Span span = shard.cols_of_row(r);
      for (std::int64_t k = 0; k < c.cols; ++k) {
        const bool inside = r * c.cols + k >= c.begin && r * c.cols + k < c.end;
        ASSERT_EQ(span.begin <= k && k < span.end, inside)
            << c.str() << ", row " << r << ", column " << k;
      }
      ASSERT_EQ(span.empty(), !rows.contains(r)) << c.str() << ", row " << r;
    }
  });
}

TEST(FlatShard, BlocksAreWholeWhereNoneIsPartlyInside) {
  struct Block {
    std::int64_t height, width;
  };
  for_cases([](const Case& c) {
    for (const Block b : {Block{1, 16}, Block{16, 16}, Block{2, 4}, Block{3, 5}, Block{128, 128}}) {
      std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> held;
      std::set<std::int64_t> block_rows;
      for (std::int64_t i = c.begin; i < c.end; ++i) {
        ++held[{i / c.cols / b.height, i % c.cols / b.width}];
        block_rows.insert(i / c.cols / b.height);
      }
      const FlatShard shard = c.shard();
      const Span span = shard.block_rows(b.height);
      ASSERT_EQ(span.size(), static_cast<std::int64_t>(block_rows.size())) << c.str();
      ASSERT_EQ(span.begin, block_rows.empty() ? 0 : *block_rows.begin()) << c.str();
      bool is_whole = true;
      for (const auto& [block, count] : held) {
        const std::int64_t height = std::min(b.height, c.rows - block.first * b.height);
        const std::int64_t width = std::min(b.width, c.cols - block.second * b.width);
        is_whole = is_whole && count == height * width;
      }
      const WeightBlocks blocks{c.rows, c.cols, b.height, b.width};
      const bool is_split = !shard.range.empty() && (blocks.are_split(shard.range.begin) ||
                                                     blocks.are_split(shard.range.end));
      ASSERT_EQ(!is_split, is_whole) << c.str() << ", blocks of " << b.height << " x " << b.width;
    }
  });
}

// The range around a cut holds each split block whole, and begins and ends at no split block.
TEST(WeightBlocks, TheRangeAroundACutHoldsItsSplitBlocks) {
  const WeightBlocks shapes[] = {
      {5, 7, 1, 4}, {5, 8, 2, 4}, {7, 6, 4, 1}, {1, 9, 16, 4}, {9, 1, 4, 4}};
  for (const WeightBlocks& b : shapes)
    for (std::int64_t cut = 1; cut < b.rows * b.cols; ++cut) {
      const std::int64_t grid_cols = ceil_div(b.cols, b.width);
      const auto block_of = [&](std::int64_t flat) {
        return flat / b.cols / b.height * grid_cols + flat % b.cols / b.width;
      };
      std::set<std::int64_t> before, split;
      for (std::int64_t flat = 0; flat < cut; ++flat) before.insert(block_of(flat));
      for (std::int64_t flat = cut; flat < b.rows * b.cols; ++flat)
        if (before.contains(block_of(flat))) split.insert(block_of(flat));
      ASSERT_EQ(b.are_split(cut), !split.empty()) << cut;
      if (split.empty()) continue;
      const Span around = b.around(cut);
      ASSERT_TRUE(around.begin < cut && cut < around.end && around.end <= b.rows * b.cols) << cut;
      ASSERT_TRUE(!b.are_split(around.begin) && !b.are_split(around.end)) << cut;
      for (std::int64_t flat = 0; flat < b.rows * b.cols; ++flat) {
        const bool is_inside = around.begin <= flat && flat < around.end;
        ASSERT_TRUE(is_inside || !split.contains(block_of(flat))) << cut << ", " << flat;
      }
    }
}

TEST(FlatShard, NibblesAreThoseOfTheRange) {
  for_cases([](const Case& c) {
    const std::int64_t pitch = ceil_div<std::int64_t>(c.cols, 2);
    std::vector<unsigned> want(c.rows * pitch);
    for (std::int64_t i = c.begin; i < c.end; ++i)
      want[i / c.cols * pitch + i % c.cols / 2] |= i % c.cols % 2 ? 0xF0 : 0x0F;

    const FlatShard shard = c.shard();
    for (std::int64_t r = 0; r < c.rows; ++r) {
      const Span bytes = shard.nibble_bytes_of_row(r);
      for (std::int64_t b = r * pitch; b < (r + 1) * pitch; ++b) {
        ASSERT_EQ(shard.nibble_mask(b), want[b]) << c.str() << ", byte " << b;
        ASSERT_EQ(bytes.begin <= b && b < bytes.end, want[b] != 0) << c.str() << ", byte " << b;
      }
    }
  });
}

// Shards cut anywhere share no nibble and leave none out.
TEST(FlatShard, NeighboursCompleteEachOthersBytes) {
  for (const std::int64_t cols : {7, 8, 33})
    for (const std::int64_t cut : {1, 7, 8, 50, 51}) {
      const FlatShard left{cols, {0, cut}}, right{cols, {cut, 9 * cols}};
      for (std::int64_t b = 0; b < 9 * ceil_div<std::int64_t>(cols, 2); ++b) {
        const bool half_byte = cols % 2 == 1 && (b + 1) % ceil_div<std::int64_t>(cols, 2) == 0;
        EXPECT_EQ(left.nibble_mask(b) & right.nibble_mask(b), 0);
        EXPECT_EQ(left.nibble_mask(b) | right.nibble_mask(b), half_byte ? 0x0F : 0xFF)
            << "byte " << b << ", " << cols << " columns cut at " << cut;
      }
    }
}

// The drawing of the header.
TEST(FlatShard, OfTheRangeWorkedByHand) {
  constexpr FlatShard kShard{8, {11, 21}};
  static_assert(kShard.rows().begin == 1 && kShard.rows().end == 3);
  static_assert(kShard.cols_of_row(1).begin == 3 && kShard.cols_of_row(1).end == 8);
  static_assert(kShard.cols_of_row(2).begin == 0 && kShard.cols_of_row(2).end == 5);
  static_assert(kShard.block_rows(2).begin == 0 && kShard.block_rows(2).end == 2);
  static_assert(kShard.nibble_mask(5) == 0xF0 && kShard.nibble_mask(10) == 0x0F);
  constexpr WeightBlocks kOneRow{4, 8, 1, 4}, kTwoRows{4, 8, 2, 4};
  static_assert(kOneRow.are_split(11) && kOneRow.are_split(21));
  static_assert(kTwoRows.are_split(11) && kTwoRows.are_split(21));
  static_assert(!kOneRow.are_split(12) && !kOneRow.are_split(20));  // halves of rows
  static_assert(kTwoRows.are_split(8) && kTwoRows.are_split(12));   // row 1 begins no block
  static_assert(!kTwoRows.are_split(16) && !kTwoRows.are_split(0) && !kTwoRows.are_split(32));
  EXPECT_EQ(kShard.nibble_bytes_of_row(1).begin, 5);
  EXPECT_EQ(kShard.nibble_bytes_of_row(2).end, 11);
}

TEST(FlatShard, CodeBytesHoldExactlyTheRange) {
  for_cases([](const Case& c) {
    const std::int64_t pitch = ceil_div<std::int64_t>(c.cols, 2);
    std::set<std::int64_t> nibbles;
    for (std::int64_t i = c.begin; i < c.end; ++i)
      nibbles.insert(i / c.cols * pitch + i % c.cols / 2);
    const Span packed = c.shard().code_bytes(4), whole = c.shard().code_bytes(8);
    ASSERT_EQ(packed.size(), static_cast<std::int64_t>(nibbles.size())) << c.str();
    if (!nibbles.empty()) {
      ASSERT_EQ(packed.begin, *nibbles.begin()) << c.str();
    }
    ASSERT_EQ(whole.size(), c.end - c.begin) << c.str();
    ASSERT_EQ(whole.empty() ? c.begin : whole.begin, c.begin) << c.str();
  });
}

}  // namespace
}  // namespace minifloat
