// Random bits: the generator against its published answers, the counter's layout, and the layout of
// cvt.rs against a port that works byte by byte.
#include "minifloat/core/philox.h"

#include <bit>
#include <cstring>
#include <set>

#include "harness.h"

namespace minifloat {
namespace {

struct KnownAnswer {
  int rounds;
  RandomBits counter;
  std::uint64_t key;  // second key word << 32 | first
  RandomBits output;
};

// Random123, tests/kat_vectors at 9545ff6413f258be2f04c1d319d99aaef7521150: all six lines of
// philox4x32.
constexpr KnownAnswer kKnownAnswers[] = {
    {7, {{0, 0, 0, 0}}, 0, {{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}}},
    {7,
     {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
     0xffffffff'ffffffff,
     {{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}}},
    {7,
     {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
     0x299f31d0'a4093822,
     {{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}}},
    {10, {{0, 0, 0, 0}}, 0, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
    {10,
     {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
     0xffffffff'ffffffff,
     {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
    {10,
     {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
     0x299f31d0'a4093822,
     {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
};

TEST(Philox, GivesThePublishedAnswers) {
  for (const KnownAnswer& known : kKnownAnswers) {
    const RandomBits got = known.rounds == 7 ? philox4x32<7>(known.counter, known.key)
                                             : philox4x32<10>(known.counter, known.key);
    for (int i = 0; i < 4; ++i)
      EXPECT_EQ(got.w[i], known.output.w[i]) << known.rounds << " rounds, word " << i;
  }
  static_assert(philox4x32({{0, 0, 0, 0}}, 0).w[0] == 0x5f6fb709,
                "constexpr, seven rounds by default");
}

// The published answer for the digits of pi, with each word of counter and key given by its role.
TEST(Philox, CountsByGroupRowAndStream) {
  const RandomBits got = random_bits_at(/*key=*/0x299f31d0'a4093822, /*stream=*/0x03707344'13198a2e,
                                        /*row=*/0x85a308d3, /*group=*/0x243f6a88);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(got.w[i], kKnownAnswers[2].output.w[i]);
}

TEST(Philox, EveryArgumentMatters) {
  std::set<std::uint64_t> seen;
  const auto add = [&](std::uint64_t seed, std::uint64_t stream, std::uint32_t row,
                       std::uint32_t group) {
    const RandomBits w = random_bits_at(seed, stream, row, group);
    seen.insert(std::uint64_t{w.w[0]} << 32 | w.w[1]);
    seen.insert(std::uint64_t{w.w[2]} << 32 | w.w[3]);
  };
  std::size_t calls = 1;
  add(0, 0, 0, 0);
  for (int bit = 0; bit < 64; ++bit, calls += 2) {
    add(std::uint64_t{1} << bit, 0, 0, 0);
    add(0, std::uint64_t{1} << bit, 0, 0);
  }
  for (int bit = 0; bit < 32; ++bit, calls += 2) {
    add(0, 0, 1u << bit, 0);
    add(0, 0, 0, 1u << bit);
  }
  EXPECT_EQ(seen.size(), 2 * calls);
}

template <int Bits>
void expect_layout(std::uint32_t word, Tally& tally) {
  for (int lane = 0; lane < kElementsPerWord; ++lane) {
    const std::uint32_t got = random_bits<Bits>(word, lane);
    const std::uint32_t want = oracle::cvt_rs_bits(Bits, word, lane)
                               << 16;  // and a clear lower half
    tally.check(got == want, [&] {
      char text[120];
      std::snprintf(text, sizeof text, "%d bits, word %08X, lane %d: %08X, expected %08X", Bits,
                    word, lane, got, want);
      return std::string(text);
    });
  }
}

TEST(RandomBits, FollowTheLayoutOfCvtRs) {
  Tally tally;
  for (int bit = 0; bit < 32; ++bit) {
    expect_layout<4>(1u << bit, tally);
    expect_layout<8>(1u << bit, tally);
  }
  for (std::uint32_t i = 0; i < 200'000; ++i) {
    expect_layout<4>(spread(i), tally);
    expect_layout<8>(spread(i), tally);
  }
  EXPECT_TRUE(tally.none_wrong());
}

// One word worked by hand: bytes b3 b2 b1 b0 = 12 34 56 78, reversed 48 2C 6A 1E.
TEST(RandomBits, OfAWordWorkedByHand) {
  constexpr std::uint32_t kWord = 0x12345678;
  constexpr std::uint32_t kFour[4] = {0x3478, 0x1E2C, 0x1256, 0x6A48};
  constexpr std::uint32_t kEight[4] = {0x5678, 0x1E6A, 0x1234, 0x2C48};
  for (int lane = 0; lane < 4; ++lane) {
    EXPECT_EQ(random_bits<4>(kWord, lane), kFour[lane] << 16) << "lane " << lane;
    EXPECT_EQ(random_bits<8>(kWord, lane), kEight[lane] << 16) << "lane " << lane;
  }
  static_assert(random_bits<4>(kWord, 3) == 0x6A48'0000u);
}

// Every bit of a word serves two lanes, at mirrored weights: 2^i in one, 2^(15 - i) in the other.
template <int Bits>
void expect_bits_used_twice() {
  for (int bit = 0; bit < 32; ++bit) {
    std::vector<int> weights;
    for (int lane = 0; lane < kElementsPerWord; ++lane) {
      const std::uint32_t random = random_bits<Bits>(1u << bit, lane) >> 16;
      ASSERT_LE(std::popcount(random), 1);
      if (random != 0) weights.push_back(std::countr_zero(random));
    }
    ASSERT_EQ(weights.size(), 2u) << Bits << " bits, word bit " << bit;
    EXPECT_EQ(weights[0] + weights[1], 15) << Bits << " bits, word bit " << bit;
  }
}
TEST(RandomBits, EachServesTwoLanesAtMirroredWeights) {
  expect_bits_used_twice<4>();
  expect_bits_used_twice<8>();
}

// Lanes 0 and 1 read the same 16 bits, and so do 2 and 3. The covariance of the events that each
// rounds up, counted over all settings of those bits, for fractions that are multiples of 2^-10, is
// at most 8.4e-5, as by enumerating all pairs of 16-digit fractions; 0 for multiples of 2^-8.
template <int Bits>
void expect_hardly_correlated(int lane) {
  constexpr int kSteps = 1024, kStep = 64;
  std::vector<int> at_least((kSteps + 1) * (kSteps + 1),
                            0);  // [i][j]: R >= 64 i here, >= 64 j there
  const auto count = [&](int i, int j) -> int& { return at_least[i * (kSteps + 1) + j]; };
  std::vector<int> read;
  for (int bit = 0; bit < 32; ++bit)
    if (random_bits<Bits>(1u << bit, lane) != 0) read.push_back(bit);
  for (std::uint32_t setting = 0; setting < 0x10000; ++setting) {
    std::uint32_t word = 0;
    for (std::size_t i = 0; i < read.size(); ++i) word |= (setting >> i & 1u) << read[i];
    ++count((random_bits<Bits>(word, lane) >> 16) / kStep,
            (random_bits<Bits>(word, lane + 1) >> 16) / kStep);
  }
  double worst = 0, worst_of_8_digits = 0;
  for (int i = kSteps - 1; i >= 0; --i)
    for (int j = kSteps - 1; j >= 0; --j) {
      count(i, j) += count(i + 1, j) + count(i, j + 1) - count(i + 1, j + 1);
      const double alone = double(kSteps - i) * (kSteps - j) / (double(kSteps) * kSteps);
      const double covariance = std::fabs(count(i, j) / 65536.0 - alone);
      worst = std::max(worst, covariance);
      if (i % 4 == 0 && j % 4 == 0) worst_of_8_digits = std::max(worst_of_8_digits, covariance);
    }
  EXPECT_LE(worst, 8.4e-5) << Bits << " bits, lanes " << lane << " and " << lane + 1;
  EXPECT_EQ(worst_of_8_digits, 0.0) << Bits << " bits, lanes " << lane << " and " << lane + 1;
}
TEST(RandomBits, NeighboursThatShareThemHardlyCorrelate) {
  for (const int lane : {0, 2}) {
    expect_hardly_correlated<4>(lane);
    expect_hardly_correlated<8>(lane);
  }
}

TEST(ReverseBits, MovesBitIToBit31MinusI) {
  for (int bit = 0; bit < 32; ++bit) EXPECT_EQ(reverse_bits(1u << bit), 1u << (31 - bit));
  for (std::uint32_t i = 0; i < 1000; ++i)
    EXPECT_EQ(reverse_bits(reverse_bits(spread(i))), spread(i));
}

// The function's published vectors (Fowler, Noll, Vo).
TEST(Fnv1a64, GivesThePublishedAnswers) {
  const auto hash = [](const char* text) { return fnv1a64(text, std::strlen(text)); };
  EXPECT_EQ(hash(""), 0xcbf29ce484222325u);
  EXPECT_EQ(hash("a"), 0xaf63dc4c8601ec8cu);
  EXPECT_EQ(hash("foobar"), 0x85944171f73967e8u);
  EXPECT_EQ(fnv1a64("\xff", 1),
            (0xcbf29ce484222325u ^ 0xff) * 0x100000001b3u);  // bytes are unsigned
}

// splitmix64's published sequence from seed 0 is mix_seed(0, 0), mix_seed(0, 1), ...
TEST(MixSeed, IsSplitmix64) {
  EXPECT_EQ(mix_seed(0, 0), 0xe220a8397b1dcdafu);
  EXPECT_EQ(mix_seed(0, 1), 0x6e789e6aa1b965f4u);
  EXPECT_EQ(mix_seed(0, 2), 0x06c45d188009454fu);
}

TEST(MixSeed, NearbySeedsAndCountsGiveDistinctKeys) {
  std::set<std::uint64_t> keys;
  for (std::uint64_t seed = 0; seed < 64; ++seed)
    for (std::uint64_t count = 0; count < 64; ++count) keys.insert(mix_seed(seed, count));
  EXPECT_EQ(keys.size(), 64u * 64u);
}

}  // namespace
}  // namespace minifloat
