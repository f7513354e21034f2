// NVFP4's two-level scales: bit for bit against the rule's steps restated in double with one
// rounding to fp32 each, and the guarantee of +up and +pow2 that no element saturates. The rule is
// that of E2M1, and of E1M2 with its largest value in the place of 6.
#include "harness.h"
#include "minifloat/core/scaling.h"

namespace minifloat {
namespace {

constexpr Nvfp4Rounding kRoundings[] = {Nvfp4Rounding::kNearest, Nvfp4Rounding::kUp,
                                        Nvfp4Rounding::kPowerOfTwo};
constexpr std::uint32_t kScaleNan = 0x7F;

double top_scale(Nvfp4Rounding rounding) {
  return rounding == Nvfp4Rounding::kPowerOfTwo ? 256 : 448;
}

template <class F>
class Nvfp4 : public ::testing::Test {};
TYPED_TEST_SUITE(Nvfp4, FourBitFormats, FormatName);

template <class F>
double max_of() {
  return oracle::max_value(OracleOf<F>::kFormat);
}

// The steps of the rule. float() of each is one IEEE rounding.
struct Steps {
  float s, inverse, block_encode, v, encode;
  unsigned code;
};
template <class F>
Steps steps(float amax, float block, Nvfp4Rounding rounding) {
  const oracle::Grid& e4m3 = grid<E4M3>();
  Steps r{};
  const double top = top_scale(rounding);
  r.s = amax == 0 ? 1.0f : std::fmin(oracle::fl32(max_of<F>() * top / double{amax}), kFloatMax);
  r.inverse = oracle::fl32(1 / double{r.s});
  const float share = oracle::fl32(1.0 / max_of<F>());
  r.block_encode = oracle::fl32(double{r.s} * share);
  r.v = std::fmin(oracle::fl32(double{block} * r.block_encode), kFloatMax);
  if (rounding == Nvfp4Rounding::kNearest) {
    r.code = e4m3.nearest(r.v);
  } else if (rounding == Nvfp4Rounding::kUp) {
    r.code = e4m3.up(r.v);
  } else {
    for (r.code = 0; r.code < e4m3.top(); ++r.code) {
      const double scale = e4m3[r.code];
      int exponent;
      const bool power_of_two = scale == 0 || std::frexp(scale, &exponent) == 0.5;
      if (power_of_two && (scale >= r.v || scale == 256)) break;
    }
  }
  const float product = oracle::fl32(e4m3[r.code] * r.inverse);
  r.encode = std::fmin(oracle::fl32(1 / double{product}), kFloatMax);
  return r;
}

// Visits pairs of a tensor's amax and a block's: the block's from 2^-24 of the tensor's (below the
// range of E4M3 scales) to equal. All magnitudes, fp32 denormals included.
template <class Visit>
void for_amax_pairs(std::uint32_t count, Visit visit) {
  for (std::uint32_t i = 0; i < count; ++i) {
    const float amax = std::fabs(spread_between(kSmallestDenormal, kInfinity, i));
    const double shrink = std::exp2(-24.0 * (spread(i * 7 + 1) >> 8) / 0x1p24);
    visit(amax, i % 8 == 0 ? amax : oracle::fl32(amax * shrink));
  }
}

TYPED_TEST(Nvfp4, FollowsTheRuleStepByStep) {
  using F = TypeParam;
  Tally tally, codes;
  for (const Nvfp4Rounding rounding : kRoundings)
    for_amax_pairs(400'000, [&](float amax, float block) {
      const Steps want = steps<F>(amax, block, rounding);
      const Nvfp4Tensor tensor = nvfp4_tensor<F>(magnitude_bits(amax), rounding);
      tally.check_bits(amax, tensor.encode, want.s);
      tally.check_bits(amax, tensor.scale, want.inverse);
      tally.check_bits(amax, tensor.block_encode, want.block_encode);
      const std::uint32_t code =
          nvfp4_block_scale(magnitude_bits(block), tensor.block_encode, rounding);
      codes.check_code(block, code, want.code);
      if (code != 0) tally.check_bits(block, nvfp4_encode_factor(code, tensor.scale), want.encode);
    });
  EXPECT_TRUE(tally.none_wrong());
  EXPECT_TRUE(codes.none_wrong());
}

// With tensor amax max * 448 the block scale before rounding is amax / max to within fp32: every
// bf16 block amax.
TYPED_TEST(Nvfp4, BlockScaleOfEveryBf16) {
  using F = TypeParam;
  Tally codes;
  for (const Nvfp4Rounding rounding : kRoundings)
    for (std::uint32_t high = 0; high < 0x7F80; ++high) {
      const float amax = static_cast<float>(max_of<F>() * top_scale(rounding)),
                  block = oracle::from_bits(high << 16);
      const Nvfp4Tensor tensor = nvfp4_tensor<F>(magnitude_bits(amax), rounding);
      codes.check_code(block,
                       nvfp4_block_scale(magnitude_bits(block), tensor.block_encode, rounding),
                       steps<F>(amax, block, rounding).code);
    }
  EXPECT_TRUE(codes.none_wrong());
}

// +up and +pow2: the largest element, scaled, is at most max, except for fp32 roundings. Six of at
// most 2^-24 each lie between S and x * enc (fl(1/max), S * fl(1/max), amax * block_encode; 1/S,
// times s, 1 / that), and x * enc is the seventh; S's rounding cancels. While S < 2^126: past that
// 1/S is a denormal, and coarser.
TYPED_TEST(Nvfp4, RoundedUpNoElementSaturates) {
  using F = TypeParam;
  const double bound = max_of<F>() * (1 + 7.01 * 0x1p-24);
  for (const Nvfp4Rounding rounding : {Nvfp4Rounding::kUp, Nvfp4Rounding::kPowerOfTwo}) {
    Tally tally;
    std::uint32_t largest = 0;
    for_amax_pairs(1'000'000, [&](float amax, float block) {
      const Nvfp4Tensor tensor = nvfp4_tensor<F>(magnitude_bits(amax), rounding);
      const std::uint32_t code =
          nvfp4_block_scale(magnitude_bits(block), tensor.block_encode, rounding);
      largest = std::max(largest, code);
      if (code == 0 || tensor.encode >= 0x1p126f) return;
      const float scaled = block * nvfp4_encode_factor(code, tensor.scale);
      tally.check(scaled <= bound, [&] {
        char text[120];
        std::snprintf(text, sizeof text, "tensor %a, block %a: scaled to %.9g", amax, block,
                      scaled);
        return std::string(text);
      });
    });
    EXPECT_TRUE(tally.none_wrong());
    EXPECT_EQ(decode<E4M3>(largest), top_scale(rounding));
  }
}

// To nearest, a block's largest element may exceed max by at most half an E4M3 step. That is 1/16
// where the scale is normal, and up to a half of the element in E4M3's subnormals.
TYPED_TEST(Nvfp4, RoundedToNearestTheLargestElementSaturatesByAtMostASixteenth) {
  using F = TypeParam;
  double worst_normal = 0, worst_subnormal = 0;
  for_amax_pairs(1'000'000, [&](float amax, float block) {
    const Nvfp4Tensor tensor = nvfp4_tensor<F>(magnitude_bits(amax), Nvfp4Rounding::kNearest);
    const std::uint32_t code =
        nvfp4_block_scale(magnitude_bits(block), tensor.block_encode, Nvfp4Rounding::kNearest);
    if (code == 0 || tensor.encode >= 0x1p126f) return;
    const double scaled = double{block} * nvfp4_encode_factor(code, tensor.scale);
    double& worst = code >= 8 ? worst_normal : worst_subnormal;
    worst = std::max(worst, scaled / max_of<F>());
  });
  EXPECT_LE(worst_normal, (1 + 1.0 / 16) * (1 + 7.01 * 0x1p-24));
  EXPECT_GT(worst_normal, 1.06);
  EXPECT_LE(worst_subnormal, 1.5 * (1 + 7.01 * 0x1p-24));
  EXPECT_GT(worst_subnormal, 1.4);
}

// The ratio to max of an element, scaled, is |x| / a * v / s. So an element saturates where it is
// past a * s / v, which is possible only in a block whose scale is rounded down. Of the seven fp32
// roundings of RoundedUpNoElementSaturates v has one less to make up for, so the bound holds.
TYPED_TEST(Nvfp4, AnElementSaturatesWhereItsScaleIsRoundedDown) {
  using F = TypeParam;
  Tally tally;
  std::uint32_t saturated = 0, kept = 0;
  for_amax_pairs(1'000'000, [&](float amax, float block) {
    const Nvfp4Tensor tensor = nvfp4_tensor<F>(magnitude_bits(amax), Nvfp4Rounding::kNearest);
    const std::uint32_t code =
        nvfp4_block_scale(magnitude_bits(block), tensor.block_encode, Nvfp4Rounding::kNearest);
    if (code == 0 || tensor.encode >= 0x1p126f || block < 0x1p-100f) return;
    const float factor = nvfp4_encode_factor(code, tensor.scale);
    const double v = steps<F>(amax, block, Nvfp4Rounding::kNearest).v, s = grid<E4M3>()[code];
    for (const float share : {1.0f, 0.99f, 0.95f, 0.9f, 0.6f}) {
      const float x = block * share;
      const double ratio = double{x} / double{block} * v / s,
                   got = double{x * factor} / max_of<F>();
      tally.check(std::fabs(got / ratio - 1) <= 7.01 * 0x1p-24, [&] {
        return "ratio " + std::to_string(got) + ", v / s " + std::to_string(v / s);
      });
      ++(ratio > 1 ? saturated : kept);
    }
  });
  EXPECT_TRUE(tally.none_wrong());
  EXPECT_GT(saturated, 100'000u);
  EXPECT_GT(kept, 100'000u);
}

TEST(Nvfp4Scale, PowersOfTwoStayPowersOfTwo) {
  for (int exponent = -9; exponent <= 8; ++exponent) {
    const float v = std::exp2(static_cast<float>(exponent));
    const std::uint32_t code =
        nvfp4_block_scale(magnitude_bits(v), 1.0f, Nvfp4Rounding::kPowerOfTwo);
    EXPECT_EQ(decode<E4M3>(code), v);
    const std::uint32_t next =
        nvfp4_block_scale(magnitude_bits(v) + 1, 1.0f, Nvfp4Rounding::kPowerOfTwo);
    EXPECT_EQ(decode<E4M3>(next), std::fmin(2 * v, 256.0f));
  }
}

TYPED_TEST(Nvfp4, OfZero) {
  using F = TypeParam;
  for (const Nvfp4Rounding rounding : kRoundings) {
    const Nvfp4Tensor zero = nvfp4_tensor<F>(0, rounding);
    EXPECT_EQ(zero.encode, 1.0f);
    EXPECT_EQ(zero.scale, 1.0f);
    EXPECT_EQ(nvfp4_block_scale(0, zero.block_encode, rounding), 0u);
    const Nvfp4Tensor tiny = nvfp4_tensor<F>(1, rounding);  // 2^-149: S stops at the largest float
    EXPECT_EQ(tiny.encode, kFloatMax);
    EXPECT_GT(tiny.scale, 0.0f);
    EXPECT_EQ(nvfp4_block_scale(0, tiny.block_encode, rounding), 0u);
  }
}

// A block too small for its tensor: nearest rounds its scale to zero, rounding up does not.
TYPED_TEST(Nvfp4, OfUnderflow) {
  using F = TypeParam;
  const float amax = 1.0f, block = 0x1p-24f;  // v = 448 * 2^-24, below half of E4M3's 2^-9
  const auto scale = [&](Nvfp4Rounding rounding) {
    return nvfp4_block_scale(magnitude_bits(block),
                             nvfp4_tensor<F>(magnitude_bits(amax), rounding).block_encode,
                             rounding);
  };
  EXPECT_EQ(scale(Nvfp4Rounding::kNearest), 0u);
  EXPECT_EQ(scale(Nvfp4Rounding::kUp), 1u);
  EXPECT_EQ(scale(Nvfp4Rounding::kPowerOfTwo), 1u);
}

TYPED_TEST(Nvfp4, OfInfinityAndNan) {
  using F = TypeParam;
  for (const Nvfp4Rounding rounding : kRoundings) {
    const float fine = nvfp4_tensor<F>(magnitude_bits(3.0f), rounding).block_encode;
    for (const std::uint32_t bits : {0x7F800000u, 0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu}) {
      const Nvfp4Tensor tensor = nvfp4_tensor<F>(bits, rounding);
      EXPECT_TRUE(std::isnan(tensor.encode));
      EXPECT_TRUE(std::isnan(tensor.scale));
      EXPECT_EQ(nvfp4_block_scale(bits, fine, rounding), kScaleNan);
      for (const float block : {0.0f, 1.0f})  // one bad block makes the tensor's every scale NaN
        EXPECT_EQ(nvfp4_block_scale(magnitude_bits(block), tensor.block_encode, rounding),
                  kScaleNan);
    }
    EXPECT_TRUE(std::isnan(nvfp4_encode_factor(kScaleNan, 1.0f)));
  }
}

TYPED_TEST(Nvfp4, OfOverflow) {
  using F = TypeParam;
  for (const Nvfp4Rounding rounding : kRoundings) {
    // A passed amax that was too small: the block scale stops at the largest.
    const float small = nvfp4_tensor<F>(magnitude_bits(1.0f), rounding).block_encode;
    for (const float block : {1.5f, 1e20f, kFloatMax})
      EXPECT_EQ(decode<E4M3>(nvfp4_block_scale(magnitude_bits(block), small, rounding)),
                top_scale(rounding));
    // The largest amax there is: every factor is a normal float.
    const Nvfp4Tensor huge = nvfp4_tensor<F>(magnitude_bits(kFloatMax), rounding);
    EXPECT_TRUE(std::isnormal(huge.encode) && std::isnormal(huge.block_encode));
    const std::uint32_t code =
        nvfp4_block_scale(magnitude_bits(kFloatMax), huge.block_encode, rounding);
    EXPECT_EQ(decode<E4M3>(code), top_scale(rounding));
    // 1.75 / FLT_MAX is below the normal floats, 6 / FLT_MAX is not.
    const float factor = nvfp4_encode_factor(code, huge.scale);
    EXPECT_EQ(std::isnormal(factor), (std::is_same_v<F, E2M1>));
    EXPECT_NEAR(double{kFloatMax} * factor, max_of<F>(), max_of<F>() * 0x1p-21);
    // The smallest normal scale under the smallest tensor scale: the factor stops at the largest
    // float.
    EXPECT_EQ(nvfp4_encode_factor(1, nvfp4_tensor<F>(1, rounding).scale), kFloatMax);
  }
}

// By hand: amax 84 gives S = 32 = 2^5. A block of amax 9 has 9 * 32 / 6 = 48 = 1.5 * 2^5, an E4M3
// value (code 0x64), so its elements are multiplied by 1 / (48 / 32) = 2/3: 9 -> 6, 4.5 -> 3, 0.75
// -> 0.5.
TEST(Nvfp4OfE2m1, OfABlockWorkedByHand) {
  for (const Nvfp4Rounding rounding : {Nvfp4Rounding::kNearest, Nvfp4Rounding::kUp}) {
    const Nvfp4Tensor tensor = nvfp4_tensor<E2M1>(magnitude_bits(84.0f), rounding);
    EXPECT_EQ(tensor.encode, 32.0f);
    EXPECT_EQ(tensor.scale, 0.03125f);
    const std::uint32_t s = nvfp4_block_scale(magnitude_bits(9.0f), tensor.block_encode, rounding);
    EXPECT_EQ(s, 0x64u);
    const float enc = nvfp4_encode_factor(s, tensor.scale);
    EXPECT_EQ(enc, 2.0f / 3.0f);
    EXPECT_EQ(encode<E2M1>(9.0f * enc), 7u);
    EXPECT_EQ(encode<E2M1>(-4.5f * enc), 13u);
    EXPECT_EQ(encode<E2M1>(0.75f * enc), 1u);
    EXPECT_EQ(decode<E2M1>(7) * decode<E4M3>(s) * tensor.scale, 9.0f);
  }
  // As a power of two: S = 1536 / 96 = 16, 9 * 16 / 6 = 24, up to 32; 9 * 16 / 32 = 4.5, to nearest
  // even 4.
  const Nvfp4Tensor tensor = nvfp4_tensor<E2M1>(magnitude_bits(96.0f), Nvfp4Rounding::kPowerOfTwo);
  EXPECT_EQ(tensor.encode, 16.0f);
  const std::uint32_t s =
      nvfp4_block_scale(magnitude_bits(9.0f), tensor.block_encode, Nvfp4Rounding::kPowerOfTwo);
  EXPECT_EQ(decode<E4M3>(s), 32.0f);
  EXPECT_EQ(encode<E2M1>(9.0f * nvfp4_encode_factor(s, tensor.scale)), 6u);
}

// By hand: amax 49 gives S = 784 / 49 = 16. A block of amax 10.5 has 10.5 * 16 / 1.75 = 96, an E4M3
// value (0x6C), so its elements are multiplied by 1 / (96 / 16) = 1/6: 10.5 -> 1.75, -4.5 -> -0.75,
// 2.25 -> 0.375, a tie, to the even code 2.
TEST(Nvfp4OfE1m2, OfABlockWorkedByHand) {
  for (const Nvfp4Rounding rounding : {Nvfp4Rounding::kNearest, Nvfp4Rounding::kUp}) {
    const Nvfp4Tensor tensor = nvfp4_tensor<E1M2>(magnitude_bits(49.0f), rounding);
    EXPECT_EQ(tensor.encode, 16.0f);
    EXPECT_EQ(tensor.scale, 0.0625f);
    const std::uint32_t s =
        nvfp4_block_scale(magnitude_bits(10.5f), tensor.block_encode, Nvfp4Rounding::kNearest);
    EXPECT_EQ(s, 0x6Cu);
    // fl32(1 / 1.75) is larger than 1 / 1.75: up from 96 is 104.
    EXPECT_EQ(nvfp4_block_scale(magnitude_bits(10.5f), tensor.block_encode, Nvfp4Rounding::kUp),
              0x6Du);
    const float enc = nvfp4_encode_factor(s, tensor.scale);
    EXPECT_EQ(enc, 1.0f / 6.0f);
    EXPECT_EQ(encode<E1M2>(10.5f * enc), 7u);
    EXPECT_EQ(encode<E1M2>(-4.5f * enc), 11u);
    EXPECT_EQ(encode<E1M2>(2.25f * enc), 2u);
    EXPECT_EQ(decode<E1M2>(7) * decode<E4M3>(s) * tensor.scale, 10.5f);
  }
  // As a power of two: S = 448 / 28 = 16, 10.5 * 16 / 1.75 = 96, up to 128; 10.5 * 16 / 128 =
  // 1.3125, to nearest 1.25.
  const Nvfp4Tensor tensor = nvfp4_tensor<E1M2>(magnitude_bits(28.0f), Nvfp4Rounding::kPowerOfTwo);
  EXPECT_EQ(tensor.encode, 16.0f);
  const std::uint32_t s =
      nvfp4_block_scale(magnitude_bits(10.5f), tensor.block_encode, Nvfp4Rounding::kPowerOfTwo);
  EXPECT_EQ(decode<E4M3>(s), 128.0f);
  EXPECT_EQ(encode<E1M2>(10.5f * nvfp4_encode_factor(s, tensor.scale)), 5u);
}

}  // namespace
}  // namespace minifloat
