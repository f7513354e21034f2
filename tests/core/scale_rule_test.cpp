// Each rule uses the equations of scaling.h that its documentation names. Four Over Six by hand:
// the two scales of a block, the order of its sums, and the results of zero, denormals, infinity
// and NaN.
#include "minifloat/core/scale_rule.h"

#include <array>
#include <vector>

#include "harness.h"

namespace minifloat {
namespace {

constexpr ScaleRounding kDefault = ScaleRounding::kDefault, kSix = ScaleRounding::kFourOverSix;

std::vector<std::uint32_t> amaxes() {
  std::vector<std::uint32_t> all = {
      0, 1, 0x007F'FFFFu, 0x0080'0000u, 0x7F7F'FFFFu, 0x7F80'0000u, 0x7FC0'0000u};
  for (std::uint32_t i = 0; i < 1000; ++i) all.push_back(spread(i) & Float32::kMagnitude);
  return all;
}
void expect_same(float got, float want) {
  EXPECT_TRUE((std::isnan(got) && std::isnan(want)) || got == want) << got << " for " << want;
}
void expect_same(const ScaleFactors& got, const ScaleFactors& want) {
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
    const BlockScale any = scale_of_block<F>(ScaleRule::kBlock, ScaleRounding::kExact, {}, amax);
    expect_same({any.encode, any.scale}, fp8_factors<F>(amax, false));
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

std::vector<std::pair<std::uint32_t, ScaleRule>> of_tensors_and_rows() {
  std::vector<std::pair<std::uint32_t, ScaleRule>> all;
  for (const std::uint32_t amax : amaxes())
    for (const ScaleRule rule : {ScaleRule::kNvfp4, ScaleRule::kNvfp4Row})
      all.emplace_back(amax, rule);
  return all;
}

template <class F>
class RuleOfNvfp4 : public ::testing::Test {};
TYPED_TEST_SUITE(RuleOfNvfp4, FourBitFormats, FormatName);

TYPED_TEST(RuleOfNvfp4, ScalesInTwoLevels) {
  using F = TypeParam;
  for (const auto& [rounding, want] : {std::pair{kDefault, Nvfp4Rounding::kNearest},
                                       {ScaleRounding::kUp, Nvfp4Rounding::kUp},
                                       {ScaleRounding::kPowerOfTwo, Nvfp4Rounding::kPowerOfTwo}})
    for (const auto& [amax, rule] : of_tensors_and_rows()) {
      const TensorScale tensor = scale_of_tensor<F>(rule, rounding, amax);
      const Nvfp4Tensor level = nvfp4_tensor<F>(amax, want);
      expect_same({tensor.encode, tensor.scale}, {level.encode, level.scale});
      for (const std::uint32_t of_block : {amax, amax / 2, 0u}) {
        const BlockScale block = scale_of_block<F>(rule, rounding, tensor, of_block);
        EXPECT_EQ(block.code, nvfp4_block_scale(of_block, level.block_encode, want));
        expect_same(block.encode, nvfp4_encode_factor(block.code, level.scale));
        EXPECT_EQ(has_zero_codes(rule, block.code), block.code == 0);
      }
    }
}

TEST(ScaleRule, WhichScalesAreLeftToTheProduct) {
  EXPECT_TRUE(is_scaled_after_product(ScaleRule::kTensor, kDefault));
  EXPECT_TRUE(is_scaled_after_product(ScaleRule::kRow, ScaleRounding::kExact));
  EXPECT_FALSE(is_scaled_after_product(ScaleRule::kRow, kDefault));
  EXPECT_FALSE(is_scaled_after_product(ScaleRule::kBlock, kDefault));
  EXPECT_FALSE(is_scaled_after_product(ScaleRule::kBlock, ScaleRounding::kExact));
  EXPECT_FALSE(is_scaled_after_product(ScaleRule::kNvfp4Row, kDefault));
  EXPECT_TRUE(has_fp32_values(ScaleRule::kBlock, ScaleRounding::kExact));
  EXPECT_FALSE(has_fp32_values(ScaleRule::kBlock, kDefault));
  EXPECT_FALSE(has_fp32_values(ScaleRule::kRow, ScaleRounding::kExact));
  EXPECT_FALSE(has_zero_codes(ScaleRule::kMx, 0));
}

// ---- Four Over Six ------------------------------------------------------------------------------
TensorScale tensor_of(float amax) {
  return scale_of_tensor<E2M1>(ScaleRule::kNvfp4, kSix, magnitude_bits(amax));
}
BlockScale scale_of(const TensorScale& tensor, float amax, bool is_four) {
  return scale_of_block<E2M1>(ScaleRule::kNvfp4, kSix, tensor,
                              magnitude_bits(amax) | (is_four ? kSecondScale : 0));
}
float error_of(const TensorScale& tensor, const BlockScale& scale, const std::vector<float>& x) {
  float sum = 0;
  for (const float v : x)
    sum += squared_error<E2M1>(tensor, scale.scale, encode<E2M1>(v * scale.encode), v);
  return sum;
}
bool takes_four(float tensor_amax, const std::vector<float>& x) {
  const TensorScale tensor = tensor_of(tensor_amax);
  float amax = 0;
  for (const float v : x) amax = std::fmax(amax, std::fabs(v));
  return takes_second(error_of(tensor, scale_of(tensor, amax, false), x),
                      error_of(tensor, scale_of(tensor, amax, true), x));
}

// A tensor amax of 1536 makes S 1: codes times block scales are values.
TEST(FourOverSix, BlocksWorkedByHand) {
  const TensorScale tensor = tensor_of(1536.0f);
  EXPECT_EQ(tensor.encode, 1.0f);
  EXPECT_EQ(scale_of(tensor, 12.0f, false).scale, 2.0f);  // 12 is 6 times 2
  EXPECT_EQ(scale_of(tensor, 12.0f, true).scale, 3.0f);   // and 4 times 3
  // 12 and 9: under 2 the 9 is 4.5, encoded as 4: an error of 1. Under 3 both are exact.
  EXPECT_EQ(error_of(tensor, scale_of(tensor, 12.0f, false), {12.0f, 9.0f}), 1.0f);
  EXPECT_EQ(error_of(tensor, scale_of(tensor, 12.0f, true), {12.0f, 9.0f}), 0.0f);
  EXPECT_TRUE(takes_four(1536.0f, {12.0f, -9.0f}));
  // 12 and 8: exact under 2. Under 3 the 8 is 2.67, encoded as 3.
  EXPECT_FALSE(takes_four(1536.0f, {12.0f, 8.0f}));
  EXPECT_FALSE(takes_four(1536.0f, {12.0f}));  // exact under both: the first
  // The largest block: 1536 under 256, or as 4 times 384.
  EXPECT_EQ(scale_of(tensor, 1536.0f, false).scale, 256.0f);
  EXPECT_EQ(scale_of(tensor, 1536.0f, true).scale, 384.0f);
}

TEST(FourOverSix, EndsOfTheRange) {
  for (const bool is_four : {false, true}) {
    // Zero: of a block, of a tensor.
    EXPECT_EQ(scale_of(tensor_of(1.0f), 0.0f, is_four).code, 0u);
    EXPECT_EQ(tensor_of(0.0f).encode, 1.0f);
    // A denormal tensor: S stops at the largest float.
    EXPECT_EQ(tensor_of(kSmallestDenormal).encode, kFloatMax);
    EXPECT_NE(scale_of(tensor_of(0x1p-130f), 0x1p-130f, is_four).code, 0u);
    // Underflow: 2^-12 before rounding, below half of 2^-9, and 1.5 of it too.
    EXPECT_EQ(scale_of(tensor_of(1536.0f), 6 * 0x1p-12f, is_four).code, 0u);
    // A passed amax that was too small: 448.
    EXPECT_EQ(scale_of(tensor_of(1.0f), 100.0f, is_four).scale, 448.0f);
    // Infinity and NaN, of a block or of the tensor, where a zero block's scale is NaN as well.
    for (const float bad : {kInfinity, kNan}) {
      EXPECT_EQ(scale_of(tensor_of(3.0f), bad, is_four).code, E4M3::kNanBits);
      EXPECT_EQ(scale_of(tensor_of(bad), 1.0f, is_four).code, E4M3::kNanBits);
      EXPECT_EQ(scale_of(tensor_of(bad), 0.0f, is_four).code, E4M3::kNanBits);
    }
  }
  EXPECT_EQ(scale_of(tensor_of(1536.0f), 6 * 0x1p-10f, false).code, 0u);  // a tie, to even
  EXPECT_EQ(scale_of(tensor_of(1536.0f), 6 * 0x1p-10f, true).code, 1u);
  EXPECT_TRUE(takes_four(1536.0f, {6 * 0x1p-10f}));
  for (const float bad : {kInfinity, kNan}) EXPECT_FALSE(takes_four(bad, {bad, 1.0f}));
  EXPECT_FALSE(takes_four(1.0f, {0.0f, -0.0f}));
}

// 2^24 plus 1 is 2^24, but plus 2 is not: the order of the additions decides the sum.
TEST(FourOverSix, RowsAreAddedInATree) {
  std::array<float, 16> rows = {};
  rows[0] = 0x1p24f, rows[4] = 1.0f, rows[12] = 1.0f;  // 4 and 12 meet first
  EXPECT_EQ(add_rows(rows.data()), 0x1p24f + 2.0f);
  rows = {};
  rows[0] = 0x1p24f, rows[8] = 1.0f, rows[4] = 1.0f;  // 0 and 8 meet first
  EXPECT_EQ(add_rows(rows.data()), 0x1p24f);
  rows = {};
  rows[0] = 0x1p24f, rows[1] = 1.0f, rows[3] = 1.0f;  // 1 and 3 meet before 0 and 1
  EXPECT_EQ(add_rows(rows.data()), 0x1p24f + 2.0f);
}

}  // namespace
}  // namespace minifloat
