// MS-EDEN's signs, random bits, sums and scales: against sums in double, and by hand.
#include "minifloat/core/eden.h"

#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "harness.h"
#include "minifloat/core/scale_rule.h"

namespace minifloat {
namespace {

constexpr RandomKey kKey = {.key = 0x1234'5678'9ABC'DEF0u, .stream = 0xFEDC'BA98'7654'3210u};

std::vector<int> signs_of(const RandomKey& key) {
  const HadamardSigns signs = eden_signs(key);
  std::vector<int> out;
  for (int i = 0; i < kEdenPoints; ++i) out.push_back((signs.of_16(i / 16) >> (i % 16)) & 1u);
  return out;
}

TEST(Eden, OperandsOfAProductShareSigns) {
  RandomKey other = kKey;
  other.stream ^= 1;
  EXPECT_EQ(signs_of(kKey), signs_of(other));
  other.stream ^= 2;
  EXPECT_NE(signs_of(kKey), signs_of(other));
  other = kKey;
  other.key ^= 1;
  EXPECT_NE(signs_of(kKey), signs_of(other));
}

// Of 10,000 keys each sign is negative in half, and each two differ in half: within 5 standard
// errors, 50 of 5,000 each.
TEST(Eden, SignsAreFairAndIndependent) {
  constexpr int kKeys = 10'000;
  std::vector<int> negative(kEdenPoints), differ(kEdenPoints);
  for (int k = 0; k < kKeys; ++k) {
    const std::vector<int> signs =
        signs_of({mix_seed(static_cast<std::uint64_t>(k), 0), kKey.stream});
    for (std::size_t i = 0; i < signs.size(); ++i) {
      negative[i] += signs[i];
      differ[i] += signs[i] != signs[(i + 1) % signs.size()];
    }
  }
  for (std::size_t i = 0; i < negative.size(); ++i) {
    EXPECT_NEAR(negative[i], kKeys / 2, 250) << i;
    EXPECT_NEAR(differ[i], kKeys / 2, 250) << i;
  }
}

TEST(Eden, EachScaleHasBitsOfItsOwn) {
  const RandomBits bits = eden_bits_at(kKey, 7, 3);
  const RandomBits want =
      philox4x32(RandomBits{{3, 7, 0x7654'3210u, 0xFEDC'BA98u}}, std::uint64_t{kKey.key});
  std::set<std::uint32_t> all;
  for (int block = 0; block < kEdenBlocks; ++block) {
    const std::uint32_t half = (want.w[block / 2] >> (block % 2 * 16)) & 0xFFFFu;
    EXPECT_EQ(eden_bits(bits, block).bits, half << 16) << block;
    all.insert(half);
  }
  EXPECT_EQ(all.size(), 8u);
}

// ---- The correction -----------------------------------------------------------------------------
// The scale is 2, so that elements 1, 3 and 9 become 0.5 · 2, 1.5 · 2 and, saturated, 6 · 2 as 4.5
// would become 4.
TEST(Eden, ABlockByHand) {
  EdenSums sums;
  add_element(sums, 0.5f * kEdenUnit, 0.5f * kEdenUnit);
  add_element(sums, 4.5f * kEdenUnit, 4.0f * kEdenUnit);
  EXPECT_EQ(sums.squares, 20.5f * kEdenUnit * kEdenUnit);
  EXPECT_EQ(sums.products, 18.25f * kEdenUnit * kEdenUnit);
  const EdenSums weighed = weighted(sums, 2.0f);
  EXPECT_EQ(weighed.squares, 4 * sums.squares);
  EXPECT_EQ(weighed.products, 4 * sums.products);
  EXPECT_EQ(eden_correction(weighed), 20.5f / 18.25f);
}

TEST(Eden, WhatIsNotFiniteIsNotCorrected) {
  const float inf = std::numeric_limits<float>::infinity(), nan = nan_value();
  for (const EdenSums sums : {EdenSums{0, 0}, EdenSums{1, 0}, EdenSums{inf, 1}, EdenSums{inf, inf},
                              EdenSums{nan, 1}, EdenSums{1, nan}, EdenSums{0x1p127f, 0x1p-10f}})
    EXPECT_EQ(eden_correction(sums), 1.0f);
  EXPECT_EQ(eden_correction({1.0f, inf}), 0.0f);
  EXPECT_EQ(weighted({inf, nan}, 0.0f).squares, 0.0f);
  EXPECT_EQ(weighted({inf, nan}, 0.0f).products, 0.0f);
  EXPECT_EQ(eden_scale(nan, 1.0f, {0}), E4M3::kNanBits);
  EXPECT_EQ(eden_scale(448.0f, 1.5f, {0xFFFF'0000u}), E4M3::kMaxBits);
  EXPECT_EQ(eden_scale(0.0f, 1.5f, {0xFFFF'0000u}), 0u);
}

// Against sums in double of random blocks: each of 16 fused steps and of 3 additions rounds by at
// most 2^-24, so that the quotient is within 2 * 20 * 2^-24.
TEST(Eden, CorrectionsAgainstDouble) {
  std::mt19937 generator(3);
  std::normal_distribution<float> normal;
  for (int trial = 0; trial < 2'000; ++trial) {
    double squares = 0, products = 0;
    EdenSums blocks[kEdenBlocks];
    for (EdenSums& block : blocks) {
      const float scale = decode<E4M3>(1 + generator() % 0x7E);
      EdenSums sums;
      for (int i = 0; i < 16; ++i) {
        const float t = std::fabs(normal(generator)) * 2.0f;
        const float q = decode<E2M1>(encode<E2M1>(t));
        add_element(sums, t * kEdenUnit, q * kEdenUnit);
        squares += double{scale} * scale * t * t;
        products += double{scale} * scale * t * q;
      }
      block = weighted(sums, scale);
    }
    for (int half = kEdenBlocks / 2; half > 0; half /= 2)
      for (int b = 0; b < half; ++b) blocks[b] = add(blocks[b], blocks[b + half]);
    EXPECT_NEAR(eden_correction(blocks[0]) / (squares / products), 1.0, 40 * 0x1p-24);
  }
}

// The mean of the stored scale over all 2^16 values of its bits is the corrected scale, less than
// 2^-16 of a gap below it.
TEST(Eden, TheStoredScaleIsUnbiased) {
  for (const unsigned code : {1u, 3u, 7u, 8u, 60u, 100u, 119u})
    for (const float correction : {0.93f, 1.0f, 1.004f, 1.31f}) {
      const float scale = decode<E4M3>(code), corrected = scale * correction;
      double sum = 0;
      for (std::uint32_t bits = 0; bits < 0x1'0000u; ++bits)
        sum += double{decode<E4M3>(eden_scale(scale, correction, {bits << 16}))};
      const double gap = std::max(double{scale} * 0.25, 0x1p-9);
      EXPECT_LE(sum / 0x1p16, double{corrected}) << code;
      EXPECT_GE(sum / 0x1p16, double{corrected} - gap * 0x1p-16) << code;
    }
}

// ---- The scale before the correction ------------------------------------------------------------
TEST(Eden, TheLargestBlockHasAScaleOf256) {
  for (const float amax : {1.0f, 3.7f, 448.0f, 0x1p-100f, 0x1p127f}) {
    const TensorScale tensor =
        scale_of_tensor<E2M1>(ScaleRule::kNvfp4, ScaleRounding::kEden, magnitude_bits(amax));
    const BlockScale block =
        scale_of_block<E2M1>(ScaleRule::kNvfp4, ScaleRounding::kEden, tensor, magnitude_bits(amax));
    EXPECT_EQ(block.scale, 256.0f) << amax;
    EXPECT_NEAR(amax * block.encode, 6.0 / (17.0 / 16 * 0.93), 6 * 0x1p-21) << amax;
  }
}

TEST(Eden, EndsOfTheRange) {
  const auto scales = [](float amax, float of_block) {
    const TensorScale tensor =
        scale_of_tensor<E2M1>(ScaleRule::kNvfp4, ScaleRounding::kEden, magnitude_bits(amax));
    return scale_of_block<E2M1>(ScaleRule::kNvfp4, ScaleRounding::kEden, tensor,
                                magnitude_bits(of_block))
        .code;
  };
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(scales(0.0f, 0.0f), 0u);
  EXPECT_EQ(scales(1.0f, 0.0f), 0u);
  EXPECT_EQ(scales(256.0f, 0x1p-10f), 0u);    // a tie, to even
  EXPECT_EQ(scales(256.0f, 0x1.1p-10f), 1u);  // 2^-9
  EXPECT_EQ(scales(1.0f, 100.0f), E4M3::kMaxBits);
  EXPECT_EQ(scales(inf, 1.0f), E4M3::kNanBits);
  EXPECT_EQ(scales(1.0f, inf), E4M3::kNanBits);
  EXPECT_EQ(scales(nan_value(), 0.0f), E4M3::kNanBits);
}

}  // namespace
}  // namespace minifloat
