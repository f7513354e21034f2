// Block arithmetic and nibble packing, against counting.
#include "minifloat/core/block.h"

#include <gtest/gtest.h>

#include <vector>

namespace minifloat {
namespace {

TEST(CeilDiv, CountsTheBlocksThatCoverALength) {
  for (std::int64_t block = 1; block <= 130; ++block) {
    std::int64_t blocks = 0;
    for (std::int64_t length = 0; length <= 400; ++length) {
      if (length > blocks * block) ++blocks;
      ASSERT_EQ(ceil_div(length, block), blocks) << length << " in blocks of " << block;
      ASSERT_EQ(round_up(length, block), blocks * block) << length << " in blocks of " << block;
    }
  }
}

TEST(IsAddressable, EndsAtTwoToThe48) {
  constexpr std::int64_t kMost = std::int64_t{1} << 48;
  EXPECT_TRUE(is_addressable({kMost}));
  EXPECT_TRUE(is_addressable({kMost / 2, 2}));
  EXPECT_TRUE(is_addressable({kMost, 0}));
  EXPECT_FALSE(is_addressable({kMost + 1}));
  EXPECT_FALSE(is_addressable({0, kMost + 1}));
  EXPECT_FALSE(is_addressable({kMost / 2, 3}));
  EXPECT_FALSE(is_addressable({kMost, kMost}));
  EXPECT_FALSE(is_addressable({-1}));
}

// A row of n codes takes ceil(n / 2) bytes; each code is read back, and an odd row's last nibble is
// zero.
TEST(Nibbles, ComeBackFromPackedRowsOfAnyLength) {
  for (const int length : {1, 2, 15, 16, 17, 33}) {
    std::vector<std::uint32_t> codes(length + 1, 0u);
    for (int i = 0; i < length; ++i) codes[i] = (7u * i + 3u) & 0xF;
    std::vector<std::uint8_t> row(ceil_div(length, 2));
    for (std::size_t b = 0; b < row.size(); ++b)
      row[b] = pack_nibbles(codes[2 * b], codes[2 * b + 1]);
    for (int i = 0; i < length; ++i) EXPECT_EQ(nibble(row.data(), i), codes[i]) << "code " << i;
    EXPECT_EQ(row.back() >> 4, codes[round_up(length, 2) - 1]);
  }
}

TEST(Nibbles, LowFirstAndNoStrayBits) {
  EXPECT_EQ(pack_nibbles(0x1, 0x2), 0x21);
  EXPECT_EQ(pack_nibbles(0xF3, 0xA4),
            0x43);  // bits above a nibble do not change its neighbour
}

}  // namespace
}  // namespace minifloat
