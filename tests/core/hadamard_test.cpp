// The transform against a matrix product in double: H[i][j] = (-1)^(number of common one bits of i,
// j).
#include "minifloat/core/hadamard.h"

#include <bit>
#include <random>

#include "harness.h"

namespace minifloat {
namespace {

// Transformer Engine's sign vector.
constexpr int kSignVector[16] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};

int entry(int i, int j) {
  return std::popcount(static_cast<unsigned>(i) & static_cast<unsigned>(j)) % 2 ? -1 : 1;
}
float norm(int points) { return oracle::fl32(1 / std::sqrt(static_cast<double>(points))); }

// Returns n points of bf16, exponents spread over `binades`.
template <int Points>
std::vector<float> random_bf16(std::mt19937& random, int binades) {
  std::vector<float> x(Points);
  for (float& v : x) {
    const auto significand = static_cast<float>(128 + random() % 128) / 128;
    v = std::ldexp(random() % 2 ? significand : -significand, static_cast<int>(random() % binades));
  }
  return x;
}

// Returns H (s .* x) in double: exact for 128 terms of 8 bits within 38 binades (8 + 38 + 7 = 53).
template <int Points>
std::vector<double> matrix_product(const std::vector<float>& x) {
  std::vector<double> y(Points, 0.0);
  for (int i = 0; i < Points; ++i)
    for (int j = 0; j < Points; ++j) y[i] += entry(i, j) * kSignVector[j % 16] * double{x[j]};
  return y;
}
double energy(const std::vector<float>& x) {
  double sum = 0;
  for (const float v : x) sum += double{v} * v;
  return sum;
}

template <class Size>
class Hadamard : public ::testing::Test {
 public:
  static constexpr int kPoints = Size::value;
  static std::vector<float> transformed(std::vector<float> x,
                                        std::uint32_t signs = kHadamardSigns) {
    hadamard<kPoints>(x.data(), signs);
    return x;
  }
};
using Sizes = ::testing::Types<std::integral_constant<int, 16>, std::integral_constant<int, 32>,
                               std::integral_constant<int, 64>, std::integral_constant<int, 128>>;
TYPED_TEST_SUITE(Hadamard, Sizes);

TYPED_TEST(Hadamard, NormIsTheFloatNearestToOneOverTheRoot) {
  EXPECT_EQ(hadamard_norm(TestFixture::kPoints), norm(TestFixture::kPoints));
}

// Unit vectors give the columns of the matrix: signs and order of every entry.
TYPED_TEST(Hadamard, ColumnsAreThoseOfTheSignedMatrix) {
  constexpr int n = TestFixture::kPoints;
  const float magnitude = round_to_bf16(norm(n));
  for (int j = 0; j < n; ++j) {
    std::vector<float> unit(n, 0.0f);
    unit[j] = 1;
    const std::vector<float> y = this->transformed(unit);
    for (int i = 0; i < n; ++i)
      ASSERT_EQ(y[i], static_cast<float>(entry(i, j) * kSignVector[j % 16]) * magnitude)
          << "row " << i << ", column " << j;
  }
}

// bf16 input within 9 binades: 8 + 8 + 7 bits at most, so the butterflies are exact in fp32, and
// the result is the exact product, times the norm rounded to fp32, rounded to bf16: bit for bit.
TYPED_TEST(Hadamard, EqualsTheMatrixProductWhereSumsAreExact) {
  constexpr int n = TestFixture::kPoints;
  const oracle::Grid bf16(oracle::kBf16);
  std::mt19937 random(n);
  Tally tally;
  for (int trial = 0; trial < 500; ++trial) {
    const std::vector<float> x = random_bf16<n>(random, 9), y = this->transformed(x);
    const std::vector<double> exact = matrix_product<n>(x);
    for (int i = 0; i < n; ++i) {
      const float scaled = oracle::fl32(exact[i] * double{norm(n)});
      const double want = bf16[bf16.nearest(std::fabs(scaled))];
      tally.check_bits(x[i], y[i], oracle::fl32(std::copysign(want, scaled)));
    }
  }
  EXPECT_TRUE(tally.none_wrong());
}

// Any input: each of the log2(n) butterflies adds at most half an fp32 ulp of a partial sum,
// bounded by the sum of |x|. The norm adds its rounding and the product's, and bf16 half an ulp,
// 2^-8 of the value.
TYPED_TEST(Hadamard, IsWithinItsRoundingsOfTheMatrixProduct) {
  constexpr int n = TestFixture::kPoints;
  std::mt19937 random(n + 1);
  for (int trial = 0; trial < 500; ++trial) {
    const std::vector<float> x = random_bf16<n>(random, 38), y = this->transformed(x);
    const std::vector<double> exact = matrix_product<n>(x);
    double total = 0;
    for (const float v : x) total += std::fabs(v);
    const double butterflies = std::log2(n) * 0x1p-24 * 1.001 * total / std::sqrt(n);
    for (int i = 0; i < n; ++i) {
      const double want = exact[i] / std::sqrt(n);
      const double bound = butterflies + (std::fabs(want) + butterflies) * (0x1p-8 + 0x1p-22);
      ASSERT_NEAR(y[i], want, bound) << "point " << i << " of trial " << trial;
    }
  }
}

// H H^T = I: with s .* (H y / sqrt(n)) as the inverse. y has a relative error of u = 2^-8 a point
// at most (bf16), whose norm the orthogonal matrix keeps; the second rounding adds another u.
TYPED_TEST(Hadamard, TwiceIsTheIdentity) {
  constexpr int n = TestFixture::kPoints;
  std::mt19937 random(n + 2);
  const double bound = 2.02 * 0x1p-8;
  for (int trial = 0; trial < 500; ++trial) {
    const std::vector<float> x = random_bf16<n>(random, 5);
    std::vector<float> back = this->transformed(this->transformed(x), 0);
    for (int i = 0; i < n; ++i) back[i] = apply_sign(back[i], kHadamardSigns, i) - x[i];
    ASSERT_LE(std::sqrt(energy(back)), bound * std::sqrt(energy(x))) << "trial " << trial;
  }
}

// Orthogonal: lengths are kept to within the two-sided error u = 2^-8 of bf16, and so are products
// of two transformed operands, as the weight gradient requires.
TYPED_TEST(Hadamard, KeepsEnergyAndProducts) {
  constexpr int n = TestFixture::kPoints;
  std::mt19937 random(n + 3);
  for (int trial = 0; trial < 500; ++trial) {
    const std::vector<float> x = random_bf16<n>(random, 5), z = random_bf16<n>(random, 5);
    const std::vector<float> tx = this->transformed(x), tz = this->transformed(z);
    EXPECT_NEAR(std::sqrt(energy(tx) / energy(x)), 1, 1.01 * 0x1p-8);
    double before = 0, after = 0;
    for (int i = 0; i < n; ++i) {
      before += double{x[i]} * z[i];
      after += double{tx[i]} * tz[i];
    }
    ASSERT_NEAR(after, before, 2.02 * 0x1p-8 * std::sqrt(energy(x) * energy(z)))
        << "trial " << trial;
  }
}

TYPED_TEST(Hadamard, NeverHidesWhatIsNotFinite) {
  constexpr int n = TestFixture::kPoints;
  for (const float bad : {kNan, kInfinity, -kInfinity})
    for (const int at : {0, 7, n - 1}) {
      std::vector<float> x(n, 1.0f);
      x[at] = bad;
      for (const float y : this->transformed(x))
        EXPECT_FALSE(std::isfinite(y)) << bad << " at " << at;
    }
  for (const float y : this->transformed(std::vector<float>(n, 0.0f))) EXPECT_EQ(y, 0.0f);
  // Finite sums may exceed fp32's range: the first point of |x| = max with aligned signs is
  // infinite.
  std::vector<float> large(n);
  for (int i = 0; i < n; ++i) large[i] = static_cast<float>(kSignVector[i % 16]) * BF16::kMax;
  EXPECT_EQ(this->transformed(large)[0], kInfinity);
}

TEST(HadamardSigns, AreTransformerEnginesVectorRepeated) {
  for (int i = 0; i < 128; ++i)
    EXPECT_EQ(apply_sign(2.5f, kHadamardSigns, i), 2.5f * static_cast<float>(kSignVector[i % 16]))
        << i;
  EXPECT_EQ(kHadamardSigns, 0xD7E8u);
  EXPECT_TRUE(std::signbit(apply_sign(0.0f, 1, 0)));
}

// By hand, 16 points, no signs. The ramp 1..16: the sum 136 over 4; the differences of neighbours,
// -8 in all, of pairs -16, of fours -32, of eights -64, over 4. The other points are 0, since a
// ramp has no mixed differences.
TEST(HadamardBlock, OfARampWorkedByHand) {
  float x[16];
  for (int i = 0; i < 16; ++i) x[i] = static_cast<float>(i + 1);
  hadamard<16>(x, 0);
  const float want[16] = {34, -2, -4, 0, -8, 0, 0, 0, -16, 0, 0, 0, 0, 0, 0, 0};
  for (int i = 0; i < 16; ++i) EXPECT_EQ(x[i], want[i]) << "point " << i;
}

// With the default signs, ones give a quarter of the sign vector's spectrum. The vector has 4
// pluses and 4 minuses in its first half, 2 and 6 in its second: sum 0 - 4, difference of the
// halves 0 + 4.
TEST(HadamardBlock, OfOnesUnderTheDefaultSigns) {
  float x[16];
  for (float& v : x) v = 1;
  hadamard<16>(x);
  EXPECT_EQ(x[0], -1.0f);
  EXPECT_EQ(x[8], 1.0f);
}

}  // namespace
}  // namespace minifloat
