// 4-bit codes as E4M3 codes: every code at every distance from its row's largest scale, against the
// values in double. Exact within the range that core/fp4_as_fp8.h states, and only there; below,
// nearest even.
#include "minifloat/core/fp4_as_fp8.h"

#include <cmath>

#include "harness.h"

namespace minifloat {
namespace {

constexpr int kLowestScale = -127, kHighestScale = 127;  // exponents of E8M0

// The exponent that codes are multiplied by, the binades in which they are exact, and the largest
// E4M3 code, by hand: 6 * 2^6 = 384 and 0.5 * 2^(6 - 14) = 2^-9; 1.75 * 2^8 = 448 and
// 0.25 * 2^(8 - 15) = 2^-9.
template <class F>
struct Worked;
template <>
struct Worked<E2M1> {
  static constexpr int kTop = 6, kExact = 14;
  static constexpr unsigned kLargest = 0x7C;
};
template <>
struct Worked<E1M2> {
  static constexpr int kTop = 8, kExact = 15;
  static constexpr unsigned kLargest = 0x7E;
};

template <class F>
class Fp4AsFp8 : public ::testing::Test {};
TYPED_TEST_SUITE(Fp4AsFp8, FourBitFormats, FormatName);

// Returns the value of an FP8 code in its row.
template <class F>
double fp8_value(unsigned code, int k, int row_exponent) {
  const unsigned fp8 = fp4_as_fp8_code<F>(code, k, row_exponent);
  const double magnitude = std::ldexp(grid<E4M3>()[fp8 & 0x7F], row_exponent - Worked<F>::kTop);
  return fp8 & 0x80 ? -magnitude : magnitude;
}
template <class F>
double value_of(unsigned code, int k) {
  const double magnitude = std::ldexp(grid<F>()[code & 0x7], k);
  return code & 0x8 ? -magnitude : magnitude;
}

TYPED_TEST(Fp4AsFp8, IsExactNearTheRowsLargestScaleAndOnlyThere) {
  using F = TypeParam;
  for (int largest = kLowestScale; largest <= kHighestScale; ++largest) {
    const int row = fp4_row_exponent<F>(largest);
    for (int k = kLowestScale; k <= largest; ++k) {
      bool all_exact = true;
      for (unsigned code = 0; code < 16; ++code) {
        const double want = value_of<F>(code, k), got = fp8_value<F>(code, k, row);
        all_exact = all_exact && got == want;
        ASSERT_EQ(std::signbit(got), std::signbit(want)) << code << " at " << k << " of " << row;
        ASSERT_LE(std::fabs(got - want), std::ldexp(1.0, row - Worked<F>::kTop - 10))
            << code << " at " << k;
      }
      ASSERT_EQ(all_exact, k >= row - Worked<F>::kExact) << k << " of " << row;
    }
  }
}

TYPED_TEST(Fp4AsFp8, RoundsToNearestEvenBelow) {
  using F = TypeParam;
  for (int distance = Worked<F>::kExact + 1; distance <= 254; ++distance)
    for (unsigned code = 0; code < 16; ++code) {
      const unsigned want =
          grid<E4M3>().nearest(static_cast<float>(value_of<F>(code, Worked<F>::kTop - distance)));
      ASSERT_EQ(fp4_as_fp8_code<F>(code, 127 - distance, 127), want) << code << " at " << distance;
    }
}

TYPED_TEST(Fp4AsFp8, NeverReachesNan) {
  using F = TypeParam;
  unsigned largest = 0;
  for (unsigned code = 0; code < 16; ++code)
    largest = std::max(largest, fp4_as_fp8_code<F>(code, 0, 0) & 0x7F);
  EXPECT_EQ(largest, Worked<F>::kLargest);
}

TEST(Fp4Scales, Exponents) {
  for (unsigned scale = 0; scale < 255; ++scale)
    EXPECT_EQ(fp4_exponent_e8m0(scale), static_cast<int>(scale) - 127);
  EXPECT_EQ(fp4_exponent_e8m0(255), kFp4AsFp8Nan);
  for (unsigned scale = 1; scale < 0x7F; ++scale)
    EXPECT_EQ(fp4_exponent_e4m3(scale), std::ilogb(grid<E4M3>()[scale])) << scale;
  EXPECT_EQ(fp4_exponent_e4m3(0), kFp4AsFp8Zero);
  EXPECT_EQ(fp4_exponent_e4m3(0x7F), kFp4AsFp8Nan);
}

TYPED_TEST(Fp4AsFp8, RowsWithoutAScale) {
  using F = TypeParam;
  EXPECT_EQ(fp4_row_exponent<F>(kFp4AsFp8Zero), 0);
  EXPECT_EQ(fp4_row_exponent<F>(kFp4AsFp8Nan), 0);
  for (unsigned code = 0; code < 16; ++code) {
    EXPECT_EQ(fp4_as_fp8_code<F>(code, kFp4AsFp8Nan, 5), 0x7Fu);
    EXPECT_EQ(fp4_as_fp8_code<F>(code, kFp4AsFp8Zero, 5), code & 0x8 ? 0x80u : 0x00u);
  }
}

// A cast that writes FP8 takes a row's largest block scale from the row's amax.
TYPED_TEST(Fp4AsFp8, BlockScalesRiseWithTheAmax) {
  using F = TypeParam;
  for (const float tensor_amax : {0.0f, 0x1p-149f, 0x1p-100f, 0.37f, 1.0f, 6.0f, 1e30f, 3.3e38f}) {
    const float factor =
        nvfp4_tensor<F>(magnitude_bits(tensor_amax), Nvfp4Rounding::kPowerOfTwo).block_encode;
    int before = kFp4AsFp8Zero;
    for (std::uint32_t amax = 0; amax <= magnitude_bits(tensor_amax); amax += 0x1'0000) {
      const int k = fp4_exponent_e4m3(nvfp4_block_scale(amax, factor, Nvfp4Rounding::kPowerOfTwo));
      ASSERT_GE(k, before) << amax << " of " << tensor_amax;
      ASSERT_TRUE(k == kFp4AsFp8Zero || (k >= -9 && k <= 8)) << k;
      before = k;
    }
  }
}

// Such a cast multiplies a block's scale, which may be 0 or NaN, by 2^(T - K).
TYPED_TEST(Fp4AsFp8, CodesFollowFromTheScaleTimesTheRowsFactor) {
  using F = TypeParam;
  constexpr int kTop = Worked<F>::kTop;
  for (const unsigned scale : {0x00u, 0x01u, 0x02u, 0x04u, 0x08u, 0x38u, 0x78u, 0x7Fu})
    for (int row = -9; row <= 8; ++row) {
      const int k = fp4_exponent_e4m3(scale);
      if (k > row) continue;
      const float one = decode<E4M3>(scale) * std::ldexp(1.0f, kTop - row);
      EXPECT_EQ(1.0f / std::ldexp(1.0f, kTop - row), fp4_as_fp8_row_scale<F>(row, 1.0f));
      for (unsigned code = 0; code < 16; ++code) {
        if (k == kFp4AsFp8Nan && code != F::kNanBits) continue;  // casts write no other code
        if (k == kFp4AsFp8Zero && code != 0) continue;
        EXPECT_EQ(encode<E4M3>(decode<F>(code) * one), fp4_as_fp8_code<F>(code, k, row))
            << scale << ", " << row << ", " << code;
      }
    }
}

TYPED_TEST(Fp4AsFp8, RowScalesAreNormalPowersOfTwo) {
  using F = TypeParam;
  constexpr int kTop = Worked<F>::kTop;
  for (int largest = kLowestScale; largest <= kHighestScale; ++largest) {
    const int row = fp4_row_exponent<F>(largest);
    EXPECT_EQ(row, std::max(largest, kTop - 126));
    const float scale = fp4_as_fp8_row_scale<F>(row, 1.0f);
    EXPECT_TRUE(std::isnormal(scale));
    EXPECT_EQ(scale, std::ldexp(1.0f, row - kTop));
    EXPECT_EQ(fp4_as_fp8_row_scale<F>(row, 0.3f),
              oracle::fl32(std::ldexp(double{0.3f}, row - kTop)));
  }
}

}  // namespace
}  // namespace minifloat
