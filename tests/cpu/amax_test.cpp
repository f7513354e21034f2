// amax against a walk over the elements: of tensors and rows, transformed or not, in both
// directions.
#include <gtest/gtest.h>

#include <vector>

#include "harness.h"
#include "minifloat/quantize.h"

namespace minifloat {
namespace {

std::vector<float> amax_of(const Matrix& x, const Spec& spec, bool columnwise) {
  const Shape read = read_shape(x.shape(), columnwise);
  Guarded<float> out(read.batch * (spec.has_row_amax() ? read.rows : 1));
  amax(x.ref(), {spec, columnwise}, out.data());
  EXPECT_TRUE(out.guards_hold());
  return std::vector<float>(out.data(), out.data() + out.size());
}

std::vector<float> want_of(const Matrix& x, const Spec& spec, bool columnwise) {
  std::vector<float> want;
  for (std::int64_t e = 0; e < x.shape().batch; ++e)
    for (const float amax : oracle::Quantizer(spec, {})(x.as_read(e, columnwise)).amax)
      want.push_back(amax);
  return want;
}

void expect_as_oracle(const Matrix& x, const char* text) {
  const Spec spec = Spec::parse(text);
  for (const bool columnwise : {false, true}) {
    const std::vector<float> got = amax_of(x, spec, columnwise),
                             want = want_of(x, spec, columnwise);
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < got.size(); ++i)
      EXPECT_TRUE(same_float(got[i], want[i]))
          << text << (columnwise ? " columnwise" : " rowwise") << ", entry " << i << ": expected "
          << want[i] << ", got " << got[i];
  }
}

TEST(Amax, EveryRuleShapeAndKindOfValues) {
  const Shape shapes[] = {{1, 1, 1},   {1, 1, 1000}, {1, 1000, 1}, {1, 127, 129}, {1, 128, 128},
                          {2, 33, 31}, {3, 130, 17}, {0, 3, 3},    {1, 0, 5},     {2, 5, 0}};
  for (const Shape& shape : shapes)
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
      for (const Kind kind : {Kind::kModerate, Kind::kWide, Kind::kSpecial}) {
        const Matrix x(shape, dtype, kind, 3, 5);
        for (const char* spec :
             {"e4m3/tensor", "nvfp4", "nvfp4/16x16", "e4m3/row", "e4m3/tensor+rht", "nvfp4+rht32",
              "e4m3/row+rht64", "e5m2/tensor+rht128"})
          expect_as_oracle(x, spec);
      }
}

TEST(Amax, NanSurvivesWhereverItIs) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
    for (const float nan : {kNan, -kNan})
      for (std::int64_t at = 0; at < 40 * 67; at += 97) {
        std::vector<float> values(40 * 67, kInfinity);
        values[static_cast<std::size_t>(at)] = nan;
        const Matrix x({1, 40, 67}, dtype, values);
        EXPECT_TRUE(std::isnan(amax_of(x, Spec::parse("nvfp4"), false)[0])) << at;
        const std::vector<float> rows = amax_of(x, Spec::parse("e4m3/row"), true);
        for (std::size_t r = 0; r < rows.size(); ++r)
          EXPECT_TRUE(static_cast<std::int64_t>(r) == at % 67 ? std::isnan(rows[r])
                                                              : rows[r] == kInfinity);
      }
}

TEST(Amax, DenormalsCount) {
  const Matrix x({1, 2, 3}, DType::kFloat32, {0, -0x1p-149f, 0x1p-149f, -0.0f, 0, 0});
  EXPECT_EQ(amax_of(x, Spec::parse("e4m3/tensor"), false)[0], 0x1p-149f);
  EXPECT_EQ(oracle::to_bits(amax_of(x, Spec::parse("e4m3/row"), false)[1]), 0u);
}

}  // namespace
}  // namespace minifloat
