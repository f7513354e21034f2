// Scale rules of FP8 and MX, and delayed scaling, against the rules restated in double. (NVFP4's
// are in scaling_nvfp4_test.cpp.) All bf16 amaxes are visited, and fp32's by samples and at every
// binade's edge.
#include "minifloat/core/scaling.h"

#include "harness.h"

namespace minifloat {
namespace {

// Visits every magnitude of bf16 and 4 million of fp32, zero and denormals included, and in each
// binade those around the mantissas where a rule steps: 1, 1.5 (of 6) and 1.75 (of 448, 57344 and
// 1.75).
template <class Visit>
void for_amaxes(Visit visit) {
  for (std::uint32_t high = 0; high < 0x7F80; ++high) visit(high << 16);
  for (std::uint32_t i = 0; i < 4'000'000; ++i)
    visit(static_cast<std::uint32_t>(std::uint64_t{spread(i)} * 0x7F80'0000u >> 32));
  for (std::uint32_t binade = 0; binade < 255; ++binade)
    for (const std::uint32_t mantissa : {0u, 0x400000u, 0x600000u, 0x7FFFFCu})
      for (std::uint32_t k = 0; k < 7; ++k)
        if (const std::uint32_t bits = (binade << 23) + mantissa + k; bits >= 3) visit(bits - 3);
}

TEST(MagnitudeBits, AreOrderedLikeValuesWithNanOnTop) {
  for (std::uint32_t i = 0; i < 1'000'000; ++i) {
    const float a = oracle::from_bits(spread(i)), b = oracle::from_bits(spread(i + 1));
    if (std::isnan(a) || std::isnan(b)) continue;
    ASSERT_EQ(magnitude_bits(a) < magnitude_bits(b), std::fabs(a) < std::fabs(b))
        << a << " and " << b;
  }
  for (const std::uint32_t nan : {0x7F800001u, 0xFFC00000u, 0xFFFFFFFFu}) {
    EXPECT_GT(magnitude_bits(oracle::from_bits(nan)), magnitude_bits(-kInfinity));
    EXPECT_FALSE(is_finite(magnitude_bits(oracle::from_bits(nan))));
  }
  EXPECT_FALSE(is_finite(magnitude_bits(-kInfinity)));
  EXPECT_TRUE(is_finite(magnitude_bits(-kFloatMax)));
}

// ---- fp32 scales: tensor, row, 128-blocks -------------------------------------------------------

template <class F>
class Fp8Factors : public ::testing::Test {};
using Fp8Formats = ::testing::Types<E4M3, E5M2>;
TYPED_TEST_SUITE(Fp8Factors, Fp8Formats, FormatName);

TYPED_TEST(Fp8Factors, FollowTheRule) {
  constexpr oracle::Format f = OracleOf<TypeParam>::kFormat;
  Tally exact, power;
  for_amaxes([&](std::uint32_t bits) {
    const double amax = oracle::from_bits(bits);
    const float quotient = oracle::fl32(oracle::max_value(f) / amax);
    const float encode = amax == 0 ? 1.0f : std::fmin(quotient, kFloatMax);
    const ScaleFactors e = fp8_factors<TypeParam>(bits, false);
    exact.check_bits(oracle::from_bits(bits), e.encode, encode);
    exact.check_bits(oracle::from_bits(bits), e.scale, oracle::fl32(1 / double{encode}));

    const float down = oracle::fl32(std::exp2(std::ilogb(encode)));  // the power of two at or below
    const ScaleFactors p = fp8_factors<TypeParam>(bits, true);
    power.check_bits(oracle::from_bits(bits), p.encode, down);
    power.check_bits(oracle::from_bits(bits), p.scale, oracle::fl32(1 / double{down}));
  });
  EXPECT_TRUE(exact.none_wrong());
  EXPECT_TRUE(power.none_wrong());
}

// The properties that users rely on. Exact: the largest element encodes to the largest code (the
// two roundings of amax * encode move it by under 2^-22, and the code's half step is at least 2^-4
// of it). Power of two: nothing saturates, and half the range or more is used. Both while max /
// amax does not overflow.
TYPED_TEST(Fp8Factors, UseTheRangeAndDoNotSaturate) {
  constexpr oracle::Format f = OracleOf<TypeParam>::kFormat;
  const double max = oracle::max_value(f);
  Tally exact, power;
  for_amaxes([&](std::uint32_t bits) {
    const float amax = oracle::from_bits(bits);
    if (amax == 0 || max / amax > kFloatMax) return;
    const ScaleFactors e = fp8_factors<TypeParam>(bits, false);
    exact.check_code(amax, encode<TypeParam>(amax * e.encode), f.max_code);
    const double scaled = double{amax} * fp8_factors<TypeParam>(bits, true).encode;
    power.check(scaled <= max && 2 * scaled > max, [&] {
      return "amax " + std::to_string(amax) + " becomes " + std::to_string(scaled);
    });
  });
  EXPECT_TRUE(exact.none_wrong());
  EXPECT_TRUE(power.none_wrong());
}

TYPED_TEST(Fp8Factors, OfSpecialValues) {
  using F = TypeParam;
  for (const bool power_of_two : {false, true}) {
    const ScaleFactors zero = fp8_factors<F>(0, power_of_two);
    EXPECT_EQ(zero.encode, 1.0f);
    EXPECT_EQ(zero.scale, 1.0f);
    for (const std::uint32_t bits : {0x7F800000u, 0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu}) {
      EXPECT_TRUE(std::isnan(fp8_factors<F>(bits, power_of_two).encode));
      EXPECT_TRUE(std::isnan(fp8_factors<F>(bits, power_of_two).scale));
    }
    const ScaleFactors tiny = fp8_factors<F>(1, power_of_two);  // 2^-149: max / amax overflows
    EXPECT_EQ(tiny.encode, power_of_two ? 0x1p127f : kFloatMax);
    EXPECT_EQ(tiny.scale, power_of_two ? 0x1p-127f : oracle::fl32(1 / double{kFloatMax}));
    EXPECT_GT(tiny.scale, 0.0f);
    const ScaleFactors huge = fp8_factors<F>(magnitude_bits(kFloatMax), power_of_two);
    EXPECT_GT(huge.encode, 0.0f);
    EXPECT_TRUE(std::isfinite(huge.scale));
  }
}

// 3 * 2^k in a row: 448 / 3 = 149.33, so 128 as a power of two, and 3 encodes to 384 = 1.5 * 2^8.
TEST(Fp8Factors, OfARowWorkedByHand) {
  const ScaleFactors row = fp8_factors<E4M3>(magnitude_bits(3.0f), true);
  EXPECT_EQ(row.encode, 128.0f);
  EXPECT_EQ(row.scale, 0.0078125f);
  EXPECT_EQ(encode<E4M3>(3.0f * row.encode), 0x7Cu);
  EXPECT_EQ(fp8_factors<E4M3>(magnitude_bits(3.0f), false).encode, 448.0f / 3.0f);
}

// ---- E8M0 scales: MX ----------------------------------------------------------------------------

template <class F>
class MxScale : public ::testing::Test {};
TYPED_TEST_SUITE(MxScale, ElementFormats, FormatName);

std::string show_scale(float amax, std::uint32_t code) {
  char text[80];
  std::snprintf(text, sizeof text, "amax %a got code %u", amax, code);
  return text;
}

// Rounded up: the smallest 2^(code - 127) that does not let amax saturate, bounded below by code 0
// and above by 254, which E1M2 alone reaches.
TYPED_TEST(MxScale, UpIsTheSmallestThatDoesNotSaturate) {
  const double max = oracle::max_value(OracleOf<TypeParam>::kFormat);
  Tally tally;
  for_amaxes([&](std::uint32_t bits) {
    const std::uint32_t code = mx_scale_up<TypeParam>(bits);
    const double amax = oracle::from_bits(bits),
                 scale = std::ldexp(1.0, static_cast<int>(code) - 127);
    const bool is_last = code == 254 && amax > std::ldexp(max, 127);
    const bool fits = amax / scale <= max || is_last, tight = code == 0 || amax / (scale / 2) > max;
    tally.check(code < 255 && fits && tight,
                [&] { return show_scale(oracle::from_bits(bits), code); });
  });
  EXPECT_TRUE(tally.none_wrong());
}

// Blackwell's conversion of the quotient gives the same scale. (exhaustive_e8m0.cpp: of every
// float.)
TYPED_TEST(MxScale, UpIsTheConversionsOwn) {
  using F = TypeParam;
  if constexpr (F::kMaxPowerOfTwo > 1.0f) {  // mx_quotient's formats
    const auto by_conversion = [](std::uint32_t amax) {
      return mx_scale_of_rounded<F>(oracle::ue8m0_rounded_up(mx_quotient<F>(amax)), amax);
    };
    Tally tally;
    for_amaxes([&](std::uint32_t bits) {
      tally.check(by_conversion(bits) == mx_scale_up<F>(bits),
                  [&] { return show_scale(oracle::from_bits(bits), by_conversion(bits)); });
    });
    EXPECT_TRUE(tally.none_wrong());
    for (const std::uint32_t bits : {0u, 1u, 0x7F7FFFFFu, 0x7F800000u, 0x7F800001u, 0x7FFFFFFFu})
      EXPECT_EQ(by_conversion(bits), mx_scale_up<F>(bits)) << bits;
  }
}

TYPED_TEST(MxScale, FloorIsTheOcpRule) {
  const int emax = oracle::max_exponent(OracleOf<TypeParam>::kFormat);
  Tally tally;
  for_amaxes([&](std::uint32_t bits) {
    const std::uint32_t code = mx_scale_floor<TypeParam>(bits);
    const float amax = oracle::from_bits(bits);
    const int want = amax == 0 ? 0 : std::max(0, std::ilogb(amax) - emax + 127);
    tally.check(static_cast<int>(code) == want, [&] { return show_scale(amax, code); });
  });
  EXPECT_TRUE(tally.none_wrong());
}

// The elements' factor is the reciprocal, exact in fp32. So x * factor is exact too, except outside
// fp32's normal range, and under the rule "up" the largest element lies in (max / 2, max].
TYPED_TEST(MxScale, UpUsesTheRange) {
  const double max = oracle::max_value(OracleOf<TypeParam>::kFormat);
  Tally tally;
  for_amaxes([&](std::uint32_t bits) {
    const std::uint32_t code = mx_scale_up<TypeParam>(bits);
    if (code == 0) return;
    const float amax = oracle::from_bits(bits), scaled = amax * e8m0_reciprocal(code);
    if (amax > std::ldexp(max, 127)) return;  // past code 254
    tally.check(scaled <= max && scaled > max / 2, [&] { return show_scale(amax, code); });
  });
  EXPECT_TRUE(tally.none_wrong());
}

TYPED_TEST(MxScale, OfSpecialValues) {
  using F = TypeParam;
  const int emax = oracle::max_exponent(OracleOf<F>::kFormat);
  EXPECT_EQ(mx_scale_up<F>(0), 0u);
  EXPECT_EQ(mx_scale_floor<F>(0), 0u);
  EXPECT_EQ(mx_scale_up<F>(1), 0u);  // the smallest denormal
  EXPECT_EQ(mx_scale_floor<F>(1), 0u);
  for (const std::uint32_t bits : {0x7F800000u, 0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu}) {
    EXPECT_EQ(mx_scale_up<F>(bits), 255u);
    EXPECT_EQ(mx_scale_floor<F>(bits), 255u);
  }
  // max itself and a power-of-two multiple fit exactly; one step past it needs the next scale.
  EXPECT_EQ(mx_scale_up<F>(magnitude_bits(F::kMax)), 127u);
  EXPECT_EQ(mx_scale_up<F>(magnitude_bits(F::kMax) + 1), 128u);
  EXPECT_EQ(mx_scale_floor<F>(magnitude_bits(F::kMax) + 1), 127u);
  EXPECT_EQ(mx_scale_up<F>(magnitude_bits(kFloatMax)), 255u - std::max(emax, 1));
  EXPECT_EQ(mx_scale_floor<F>(magnitude_bits(kFloatMax)), 254u - static_cast<unsigned>(emax));
}

// ---- Delayed scaling ----------------------------------------------------------------------------

TEST(DelayedAmax, TakesTheLargestOrTheNewest) {
  const float history[] = {2, 7, 0.5f, 7.5f};
  EXPECT_EQ(delayed_amax(history, 4, DelayedAmax::kMax, 0, 1), 7.5f);
  EXPECT_EQ(delayed_amax(history, 4, DelayedAmax::kMostRecent, 0, 1), 2);
  EXPECT_EQ(delayed_amax(history, 2, DelayedAmax::kMax, 0, 1), 7);
  EXPECT_EQ(delayed_amax(history, 1, DelayedAmax::kMax, 0, 1), 2);
}

TEST(DelayedAmax, SkipsWhatIsZeroOrNotFinite) {
  const float history[] = {0, kNan, kInfinity, -kNan, 3, 5};
  EXPECT_EQ(delayed_amax(history, 6, DelayedAmax::kMax, 0, 1), 5);
  EXPECT_EQ(delayed_amax(history, 6, DelayedAmax::kMostRecent, 0, 1), 3);
}

TEST(DelayedAmax, KeepsThePreviousWhereNothingIsUsable) {
  const float history[] = {0, -0.0f, kNan, kInfinity};
  for (const DelayedAmax algorithm : {DelayedAmax::kMax, DelayedAmax::kMostRecent}) {
    EXPECT_EQ(delayed_amax(history, 4, algorithm, 3, 11), 11);  // the margin is already in 11
    EXPECT_EQ(delayed_amax(history, 0, algorithm, 3, 11), 11);
  }
}

TEST(DelayedAmax, MarginIsAPowerOfTwoThatStopsAtTheLargestFloat) {
  const float history[] = {3, kSmallestDenormal, kFloatMax};
  EXPECT_EQ(delayed_amax(history, 1, DelayedAmax::kMax, 4, 1), 48);
  EXPECT_EQ(delayed_amax(history + 1, 1, DelayedAmax::kMax, 2, 1), 4 * kSmallestDenormal);
  EXPECT_EQ(delayed_amax(history, 3, DelayedAmax::kMax, 1, 1), kFloatMax);
  // So a margin of m halves the encode factor m times.
  const float amax = delayed_amax(history, 1, DelayedAmax::kMostRecent, 4, 1);
  EXPECT_EQ(fp8_factors<E4M3>(magnitude_bits(amax), false).encode,
            fp8_factors<E4M3>(magnitude_bits(3.0f), false).encode / 16);
}

}  // namespace
}  // namespace minifloat
