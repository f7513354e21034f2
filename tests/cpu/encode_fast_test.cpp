// The fast encodings equal the definition: on a stride through all floats, on every bf16, around
// every code and midpoint, and for all 2^16 random bits on values of every binade.
// exhaustive_encode_fast.cpp visits every float.
#include "encode_fast_check.h"

#include <gtest/gtest.h>

#include <cmath>

namespace minifloat {
namespace {

template <class F>
class EncodeFast : public testing::Test {};
using Formats = testing::Types<E4M3, E5M2, E2M1, E1M2>;
TYPED_TEST_SUITE(EncodeFast, Formats);

TYPED_TEST(EncodeFast, EveryBf16AndAStrideThroughAllFloats) {
  for (std::uint64_t bits = 0; bits < (1ull << 32); bits += 0x10000)
    ASSERT_TRUE(encodes_alike<TypeParam>(static_cast<std::uint32_t>(bits))) << std::hex << bits;
  for (std::uint64_t bits = 0; bits < (1ull << 32); bits += 211)  // 20 million
    ASSERT_TRUE(encodes_alike<TypeParam>(static_cast<std::uint32_t>(bits))) << std::hex << bits;
}

TYPED_TEST(EncodeFast, AroundEveryCodeAndMidpoint) {
  for (std::uint32_t code = 0; code < TypeParam::kMaxBits; ++code) {
    const float low = decode<TypeParam>(code), high = decode<TypeParam>(code + 1);
    for (const float x : {low, (low + high) / 2, high})
      for (int ulps = -3; ulps <= 3; ++ulps)
        for (const std::uint32_t sign : {0u, 0x8000'0000u}) {
          const std::uint32_t bits =
              (bit_cast<std::uint32_t>(x) + static_cast<std::uint32_t>(ulps)) ^ sign;
          EXPECT_TRUE(encodes_alike<TypeParam>(bits)) << std::hex << bits;
        }
  }
}

TYPED_TEST(EncodeFast, AllRandomBitsInEveryBinade) {
  const float largest = TypeParam::kMax;
  for (float x = largest * 0.99f; x > 1e-9f * largest; x *= 0.43f)
    for (std::uint32_t r = 0; r < 65536; ++r)
      ASSERT_EQ(cpu::encode_stochastic<TypeParam>(x, r << 16),
                (encode<TypeParam, Stochastic>(x, {r << 16})))
          << x << " " << r;
}

}  // namespace
}  // namespace minifloat
