// Rounding, against the oracle: every bf16, every value and midpoint and their neighbours, and 20
// million floats a format by default (all 2^32 in exhaustive_rounding.cpp). The test of stochastic
// rounding is exact too: the whole space of 16 random bits is counted, not sampled.
#include "minifloat/core/rounding.h"

#include "harness.h"
#include "minifloat/core/philox.h"

namespace minifloat {
namespace {

constexpr std::uint32_t kSamples = 20'000'000;

template <class F>
void check_deterministic(float x, Tally& tally) {
  tally.check_code(x, encode<F>(x), grid<F>().nearest(x));
  tally.check_code(x, encode<F>(x, AwayFromZero{}), grid<F>().up(x));
}

// Visits x and the three floats on each side, both signs.
template <class Visit>
void around(double value, Visit visit) {
  for (std::int64_t k = -3; k <= 3; ++k) {
    const std::int64_t bits = oracle::to_bits(oracle::fl32(value)) + k;
    if (bits < 0) continue;
    const float x = oracle::from_bits(static_cast<std::uint32_t>(bits));
    visit(x);
    visit(-x);
  }
}

template <class F>
class Rounding : public ::testing::Test {};
TYPED_TEST_SUITE(Rounding, ElementFormats, FormatName);

TYPED_TEST(Rounding, EveryBf16) {
  Tally tally;
  for (std::uint32_t high = 0; high < 0x10000; ++high)
    check_deterministic<TypeParam>(oracle::from_bits(high << 16), tally);
  EXPECT_TRUE(tally.none_wrong());
}

TYPED_TEST(Rounding, EveryValueAndMidpointAndItsNeighbours) {
  using F = TypeParam;
  Tally tally;
  const auto visit = [&](float x) { check_deterministic<F>(x, tally); };
  for (unsigned c = 0; c <= grid<F>().top(); ++c) {
    around(grid<F>()[c], visit);
    if (c > 0) around((grid<F>()[c] + grid<F>()[c - 1]) / 2, visit);
  }
  for (const double past : {1.03125, 1.0625, 1.125, 2.0, 1e9}) around(past * F::kMax, visit);
  EXPECT_TRUE(tally.none_wrong());
}

TYPED_TEST(Rounding, Samples) {
  using F = TypeParam;
  Tally tally;
  const float low = decode<F>(1) / 8, high = F::kMax * 2;  // around the format's values
  for (std::uint32_t i = 0; i < kSamples; ++i) {
    const float x = i % 2 ? oracle::from_bits(spread(i)) : spread_between(low, high, i / 2);
    tally.check_code(x, encode<F>(x), grid<F>().nearest(x));
  }
  EXPECT_TRUE(tally.none_wrong());
}

TYPED_TEST(Rounding, NonFiniteAndTiny) {
  using F = TypeParam;
  constexpr std::uint32_t kMinus = F::kSignBit;
  EXPECT_EQ(encode<F>(kInfinity), F::kMaxBits);
  EXPECT_EQ(encode<F>(-kInfinity), kMinus | F::kMaxBits);
  EXPECT_EQ(encode<F>(kFloatMax), F::kMaxBits);
  EXPECT_EQ(encode<F>(0.0f), 0u);
  EXPECT_EQ(encode<F>(-0.0f), kMinus);
  EXPECT_EQ(encode<F>(-kSmallestDenormal), kMinus);
  EXPECT_EQ(encode<F>(kSmallestDenormal, AwayFromZero{}), 1u);
  EXPECT_EQ(encode<F>(-kSmallestDenormal, Stochastic{0xFFFF'0000u}), kMinus);
  for (const std::uint32_t nan :
       {0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu, 0xFF800001u, 0xFFFFFFFFu}) {
    EXPECT_EQ(encode<F>(oracle::from_bits(nan)), F::kNanBits);
    EXPECT_EQ(encode<F>(oracle::from_bits(nan), AwayFromZero{}), F::kNanBits);
    EXPECT_EQ(encode<F>(oracle::from_bits(nan), Stochastic{0xFFFF'0000u}), F::kNanBits);
  }
}

// In every gap between neighbouring values, for fractions on and off multiples of 2^-16: each of
// the 2^16 random words rounds as the oracle does, and exactly floor(fraction * 2^16) of them round
// up.
TYPED_TEST(Rounding, StochasticOverTheWholeRandomSpace) {
  using F = TypeParam;
  Tally tally;
  for (unsigned c = 0; c < grid<F>().top(); ++c) {
    const double below = grid<F>()[c], gap = grid<F>()[c + 1] - below;
    for (const double fraction : {0x1p-16, 0x1.8p-16, 0.25 + 0x1p-17, 0.5, 0.6875, 1 - 0x1p-16}) {
      const float x = oracle::fl32((c % 2 ? -1 : 1) * (below + fraction * gap));
      const oracle::Place place = grid<F>().place(std::fabs(x));
      const auto digits = static_cast<std::uint32_t>(place.above * 65536);  // of the fraction, 16
      const std::uint32_t sign = c % 2 ? F::kSignBit : 0;
      std::uint32_t ups = 0;
      for (std::uint32_t random = 0; random < 0x10000; ++random) {
        const std::uint32_t code = encode<F>(x, Stochastic{random << 16});
        const bool up = digits + random >= 0x10000;
        tally.check_code(x, code, (sign | place.code) + (up ? 1 : 0));
        ups += (code & (F::kSignBit - 1)) == place.code + 1;
      }
      EXPECT_EQ(ups, digits) << "x = " << x << " between " << below << " and " << below + gap;
    }
  }
  EXPECT_TRUE(tally.none_wrong());
}

// Below the smallest value: the discarded digits are longer than a word, and only the first 16
// places of the fraction may count.
TYPED_TEST(Rounding, StochasticBelowTheSmallestValue) {
  using F = TypeParam;
  for (int halvings = 1; halvings <= 40; ++halvings) {
    const float x = std::ldexp(1.99f * decode<F>(1), -halvings - 1);
    const auto digits = static_cast<std::uint32_t>(double{x} / double{decode<F>(1)} * 65536);
    std::uint32_t ups = 0;
    for (std::uint32_t random = 0; random < 0x10000; ++random)
      ups += encode<F>(x, Stochastic{random << 16});
    EXPECT_EQ(ups, digits) << "x = " << x;
  }
}

TYPED_TEST(Rounding, StochasticSamples) {
  using F = TypeParam;
  Tally tally;
  const float low = decode<F>(1) / 0x1p20f, high = F::kMax * 2;
  for (std::uint32_t i = 0; i < kSamples / 4; ++i) {
    const float x = i % 2 ? oracle::from_bits(spread(i)) : spread_between(low, high, i / 2);
    const std::uint32_t random = spread(i ^ 0x5555'5555u) >> 16;
    tally.check_code(x, encode<F>(x, Stochastic{random << 16}), grid<F>().stochastic(x, random));
  }
  EXPECT_TRUE(tally.none_wrong());
}

// Past the largest value nothing is random: the mean is the largest, and the bias is the distance
// to it. Up to the largest it is under 2^-16 of a gap, by the tests above.
TYPED_TEST(Rounding, StochasticMeanPastTheLargestIsTheLargest) {
  using F = TypeParam;
  for (const double factor : {1 + 0x1p-20, 17.0 / 16, 1.5, 1e30}) {
    const float x = oracle::fl32(factor * F::kMax);
    double sum = 0;
    for (std::uint32_t random = 0; random < 0x10000; ++random)
      sum += double{decode<F>(encode<F>(x, Stochastic{random << 16}))};
    EXPECT_EQ(sum / 65536, double{F::kMax}) << "x = " << x;
  }
}

// Through the real word layout. Each lane reads 16 of a word's 32 bits; over all settings of them
// the mean of the decoded value is x, except for the digits past the 16th, which are cut: (mean -
// x) / gap is in (-2^-16, 0]. Fractions here have at most 16 digits, so the mean is exact.
TYPED_TEST(Rounding, StochasticIsUnbiasedInEveryLaneOfAWord) {
  using F = TypeParam;
  for (int lane = 0; lane < kElementsPerWord; ++lane) {
    // The bits that this lane reads, found by flipping each.
    std::vector<int> read;
    for (int bit = 0; bit < 32; ++bit)
      if (random_bits<F::kBits>(1u << bit, lane) != 0) read.push_back(bit);
    ASSERT_EQ(read.size(), 16u) << "lane " << lane;
    for (const unsigned c : {0u, 2u, grid<F>().top() - 1}) {
      const double below = grid<F>()[c], gap = grid<F>()[c + 1] - below;
      const float x = oracle::fl32(below + 0.3125 * gap);
      double sum = 0;
      for (std::uint32_t setting = 0; setting < 0x10000; ++setting) {
        std::uint32_t word = spread(setting);  // the bits that the lane does not read: any
        for (int i = 0; i < 16; ++i) {
          word &= ~(1u << read[i]);
          word |= (setting >> i & 1u) << read[i];
        }
        sum += decode<F>(encode<F>(x, Stochastic{random_bits<F::kBits>(word, lane)}));
      }
      EXPECT_EQ(sum / 65536, x) << "lane " << lane << " between " << below << " and "
                                << below + gap;
    }
  }
}

// With the bits of Philox. The mean of n draws lies within five standard errors of x. The seed
// fixes the draws, so that the test has one result.
TYPED_TEST(Rounding, StochasticMeanOverPhilox) {
  using F = TypeParam;
  constexpr int kGroups = 1 << 16;
  const double below = grid<F>()[5], gap = grid<F>()[6] - below;
  for (const double fraction : {0.1, 0.5, 0.77}) {
    const float x = oracle::fl32(below + fraction * gap);
    double sums[kElementsPerCall] = {};
    for (std::uint32_t group = 0; group < kGroups; ++group) {
      const RandomBits bits = random_bits_at(42, 7, 3, group);
      for (int e = 0; e < kElementsPerCall; ++e)
        sums[e] += decode<F>(encode<F>(
            x,
            Stochastic{random_bits<F::kBits>(bits.w[e / kElementsPerWord], e % kElementsPerWord)}));
    }
    const double error = gap * std::sqrt(fraction * (1 - fraction) / kGroups);
    for (int e = 0; e < kElementsPerCall; ++e)
      EXPECT_NEAR(sums[e] / kGroups, x, 5 * error) << "element " << e << ", fraction " << fraction;
  }
}

// Every code in every place of a word, beside every other code: each NaN becomes the one NaN, and
// other codes stay.
template <class F>
void expect_one_nan(bool (*is_infinity)(std::uint32_t)) {
  const auto want = [](std::uint32_t code) {
    return std::isnan(decode<F>(code)) ? F::kNanBits : code;
  };
  Tally tally;
  for (std::uint32_t code = 0; code < 256; ++code)
    for (std::uint32_t other = 0; other < 256; ++other) {
      if (is_infinity(code) || is_infinity(other)) continue;
      for (int place = 0; place < 32; place += 8) {
        const std::uint32_t others = 0x0101'0101u & ~(1u << place);
        const std::uint32_t got = canonicalize_nan<F>(code << place | other * others);
        tally.check_code(decode<F>(code), got, want(code) << place | want(other) * others);
      }
    }
  EXPECT_TRUE(tally.none_wrong());
}
TEST(Nan, IsOneCodeOfItsFormat) {
  expect_one_nan<E4M3>([](std::uint32_t) { return false; });
  expect_one_nan<E5M2>([](std::uint32_t code) { return (code & 0x7F) == E5M2::kInfBits; });
}

TEST(Bf16Rounding, EveryValueEveryMidpointAndTheirNeighbours) {
  const oracle::Grid bf16(oracle::kBf16);  // its last entry is 2^128, for infinity
  Tally tally;
  for (std::uint32_t high = 0; high < 0x10000; ++high)
    for (const std::uint32_t low : {0x0000u, 0x0001u, 0x0003u, 0x7FFDu, 0x7FFFu, 0x8000u, 0x8001u,
                                    0x8003u, 0xFFFDu, 0xFFFFu}) {
      const float x = oracle::from_bits(high << 16 | low);
      tally.check_code(x, encode_bf16(x), bf16.nearest(x));
      if (!std::isnan(x)) {
        const double value = bf16[bf16.nearest(std::fabs(x))];
        tally.check_bits(x, std::fabs(round_to_bf16(x)), oracle::fl32(value));
      }
    }
  EXPECT_TRUE(tally.none_wrong());
}

}  // namespace
}  // namespace minifloat
