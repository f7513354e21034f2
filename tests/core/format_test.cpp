// Every code of every format, against the values that its definition gives.
#include "minifloat/core/format.h"

#include "harness.h"
#include "minifloat/core/rounding.h"
#include "minifloat/core/scaling.h"

namespace minifloat {
namespace {

template <class F>
class ElementFormat : public ::testing::Test {};
TYPED_TEST_SUITE(ElementFormat, ElementFormats, FormatName);

TYPED_TEST(ElementFormat, TableStatesWhatTheDefinitionGives) {
  using F = TypeParam;
  constexpr oracle::Format f = OracleOf<F>::kFormat;
  EXPECT_EQ(F::kBits, 1 + f.exponent_bits + f.mantissa_bits);
  EXPECT_EQ(F::kSignBit, 1u << (F::kBits - 1));
  EXPECT_EQ(F::kMaxBits, f.max_code);
  EXPECT_EQ(F::kNanBits, f.nan_code);
  EXPECT_EQ(F::kMax, oracle::max_value(f));
  EXPECT_EQ(F::kMaxPowerOfTwo, std::exp2(oracle::max_exponent(f)));
  EXPECT_EQ(std::exp2(F::kMinExponent), oracle::value(f, 1u << f.mantissa_bits));
}

TYPED_TEST(ElementFormat, DecodesEveryCode) {
  using F = TypeParam;
  Tally tally;
  for (std::uint32_t code = 0; code < 2 * F::kSignBit; ++code) {
    const std::uint32_t magnitude = code & (F::kSignBit - 1);
    float want = oracle::fl32(grid<F>()[std::min(magnitude, grid<F>().top())]);
    if (magnitude > F::kMaxBits) want = kNan;
    if constexpr (requires { F::kInfBits; })
      if (magnitude == F::kInfBits) want = kInfinity;
    if (code != magnitude) want = -want;
    for (const std::uint32_t above : {0u, 1u, 0xABCDEFu})  // upper bits are ignored
      tally.check_bits(want, decode<F>(code | above << F::kBits), want);
  }
  EXPECT_TRUE(tally.none_wrong());
}

// A value of the format is kept by every rounding rule, whatever the random bits.
TYPED_TEST(ElementFormat, KeepsItsOwnValues) {
  using F = TypeParam;
  Tally tally;
  for (std::uint32_t code = 0; code < 2 * F::kSignBit; ++code) {
    if ((code & (F::kSignBit - 1)) > F::kMaxBits) continue;
    const float x = decode<F>(code);
    tally.check_code(x, encode<F>(x), code);
    tally.check_code(x, encode<F>(x, AwayFromZero{}), code);
    for (const std::uint32_t random : {0u, 1u, 0x8000u, 0xFFFFu})
      tally.check_code(x, encode<F>(x, Stochastic{random << 16}), code);
  }
  EXPECT_TRUE(tally.none_wrong());
}

TEST(Bf16, DecodesEveryCodeAndKeepsIt) {
  Tally tally;
  for (std::uint32_t code = 0; code < 0x10000; ++code) {
    const std::uint32_t magnitude = code & 0x7FFF;
    const float x = decode_bf16(code);
    if (magnitude > 0x7F80) {  // NaN: any payload becomes the quiet NaN
      tally.check(std::isnan(x), [&] { return "code " + std::to_string(code) + " is not NaN"; });
      tally.check_code(x, encode_bf16(x), 0x7FC0);
      continue;
    }
    const double value = magnitude == 0x7F80 ? kInfinity : oracle::value(oracle::kBf16, magnitude);
    tally.check_bits(x, x, oracle::fl32(code == magnitude ? value : -value));
    tally.check_code(x, encode_bf16(x), code);
  }
  EXPECT_TRUE(tally.none_wrong());
  EXPECT_EQ(BF16::kMax, oracle::max_value(oracle::kBf16));
}

TEST(E8m0, DecodesEveryCodeAndItsReciprocal) {
  for (std::uint32_t code = 0; code < 255; ++code) {
    const double value = std::ldexp(1.0, static_cast<int>(code) - 127);
    EXPECT_EQ(decode_e8m0(code), value) << "code " << code;
    EXPECT_EQ(e8m0_reciprocal(code), 1 / value) << "code " << code;
  }
  EXPECT_TRUE(std::isnan(decode_e8m0(255)));
  EXPECT_TRUE(std::isnan(e8m0_reciprocal(255)));
}

TEST(Float32, TableStatesWhatTheTypeSays) {
  EXPECT_EQ(Float32::kMax, kFloatMax);
  EXPECT_EQ(oracle::from_bits(Float32::kExponent), kInfinity);
  EXPECT_TRUE(std::isnan(oracle::from_bits(Float32::kNanBits)));
  EXPECT_EQ(oracle::from_bits(Float32::kImplicitBit), std::numeric_limits<float>::min());
  EXPECT_EQ(Float32::kExponent | Float32::kMantissa, Float32::kMagnitude);
}

}  // namespace
}  // namespace minifloat
