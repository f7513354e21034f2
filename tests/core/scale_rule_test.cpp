// Each rule uses the equations of scaling.h that its documentation names.
#include "minifloat/core/scale_rule.h"

#include <vector>

#include "harness.h"

namespace minifloat {
namespace {

constexpr ScaleRounding kDefault = ScaleRounding::kDefault;

std::vector<std::uint32_t> amaxes() {
  std::vector<std::uint32_t> all = {
      0, 1, 0x007F'FFFFu, 0x0080'0000u, 0x7F7F'FFFFu, 0x7F80'0000u, 0x7FC0'0000u};
  for (std::uint32_t i = 0; i < 1000; ++i) all.push_back(spread(i) & Float32::kMagnitude);
  return all;
}
void expect_same(float got, float want) {
  EXPECT_TRUE((std::isnan(got) && std::isnan(want)) || got == want) << got << " for " << want;
}
void expect_same(const Factors& got, const Factors& want) {
  expect_same(got.encode, want.encode);
  expect_same(got.scale, want.scale);
}

template <class F>
class RuleOfFp8 : public ::testing::Test {};
using Fp8 = ::testing::Types<E4M3, E5M2>;
TYPED_TEST_SUITE(RuleOfFp8, Fp8, FormatName);

TYPED_TEST(RuleOfFp8, ScalesInFp32) {
  using F = TypeParam;
  for (const std::uint32_t amax : amaxes()) {
    const TensorScale tensor = scale_of_tensor<F>(ScaleRule::kTensor, kDefault, amax);
    expect_same({tensor.encode, tensor.scale}, fp8_factors<F>(amax, false));
    expect_same(scale_of_block<F>(ScaleRule::kTensor, kDefault, tensor, 5).encode, tensor.encode);

    const auto row = [&](ScaleRounding r) { return fp32_factors<F>(ScaleRule::kRow, r, amax); };
    expect_same(row(kDefault), fp8_factors<F>(amax, true));
    expect_same(row(ScaleRounding::kExact), fp8_factors<F>(amax, false));
    const BlockScale exact = scale_of_block<F>(ScaleRule::kRow, ScaleRounding::kExact, {}, amax);
    expect_same({exact.encode, exact.scale}, {fp8_factors<F>(amax, false).encode, 1.0f});
    for (const ScaleRule rule : {ScaleRule::kRow, ScaleRule::kBlock}) {
      const BlockScale block = scale_of_block<F>(rule, kDefault, {}, amax);
      expect_same({block.encode, block.scale}, fp8_factors<F>(amax, true));
    }
  }
}

template <class F>
class RuleOfMx : public ::testing::Test {};
TYPED_TEST_SUITE(RuleOfMx, ElementFormats, FormatName);

TYPED_TEST(RuleOfMx, ScalesInE8m0) {
  using F = TypeParam;
  for (const std::uint32_t amax : amaxes())
    for (const bool floor : {false, true}) {
      const BlockScale block =
          scale_of_block<F>(ScaleRule::kMx, floor ? ScaleRounding::kFloor : kDefault, {}, amax);
      EXPECT_EQ(block.code, floor ? mx_scale_floor<F>(amax) : mx_scale_up<F>(amax));
      expect_same({block.encode, block.scale},
                  {e8m0_reciprocal(block.code), decode_e8m0(block.code)});
    }
}

TEST(RuleOfNvfp4, ScalesInTwoLevels) {
  for (const auto& [rounding, want] : {std::pair{kDefault, Nvfp4Rounding::kNearest},
                                       {ScaleRounding::kUp, Nvfp4Rounding::kUp},
                                       {ScaleRounding::kPowerOfTwo, Nvfp4Rounding::kPowerOfTwo}})
    for (const std::uint32_t amax : amaxes()) {
      const TensorScale tensor = scale_of_tensor<E2M1>(ScaleRule::kNvfp4, rounding, amax);
      const Nvfp4Tensor level = nvfp4_tensor(amax, want);
      expect_same({tensor.encode, tensor.scale}, {level.encode, level.scale});
      for (const std::uint32_t of_block : {amax, amax / 2, 0u}) {
        const BlockScale block =
            scale_of_block<E2M1>(ScaleRule::kNvfp4, rounding, tensor, of_block);
        EXPECT_EQ(block.code, nvfp4_block_scale(of_block, level.block_encode, want));
        expect_same(block.encode, nvfp4_encode_factor(block.code, level.scale));
        EXPECT_EQ(has_zero_codes(ScaleRule::kNvfp4, block.code), block.code == 0);
      }
    }
}

TEST(ScaleRule, WhichScalesAreLeftToTheProduct) {
  EXPECT_TRUE(is_scaled_after_product(ScaleRule::kTensor, kDefault));
  EXPECT_TRUE(is_scaled_after_product(ScaleRule::kRow, ScaleRounding::kExact));
  EXPECT_FALSE(is_scaled_after_product(ScaleRule::kRow, kDefault));
  EXPECT_FALSE(is_scaled_after_product(ScaleRule::kBlock, kDefault));
  EXPECT_FALSE(has_zero_codes(ScaleRule::kMx, 0));
}

}  // namespace
}  // namespace minifloat
