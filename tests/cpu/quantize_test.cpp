// quantize against the oracle: every spec and flag, both dtypes, both directions, shapes around the
// block and tile sizes, values of every kind.
#include "minifloat/quantize.h"

#include <gtest/gtest.h>

#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "harness.h"
#include "minifloat/error.h"

namespace minifloat {
namespace {

// Returns every base with every rounding of its scale.
const std::vector<std::string>& bases() {
  static const std::vector<std::string> all = {"e4m3/tensor",
                                               "e5m2/tensor",
                                               "e4m3/row",
                                               "e4m3/row+exact",
                                               "e4m3/1x128",
                                               "e4m3/128x128",
                                               "mxfp8",
                                               "mxfp8+floor",
                                               "mxfp8/e5m2",
                                               "mxfp8/e5m2+floor",
                                               "mxfp8/32x32",
                                               "mxfp8/32x32+floor",
                                               "mxfp4",
                                               "mxfp4+floor",
                                               "nvfp4",
                                               "nvfp4+up",
                                               "nvfp4+pow2",
                                               "nvfp4/16x16",
                                               "nvfp4/16x16+up",
                                               "nvfp4/16x16+pow2",
                                               "nvfp4+4over6",
                                               "nvfp4/16x16+4over6",
                                               "e4m3/1x128+exact",
                                               "e4m3/128x128+exact",
                                               "nvfp4/row",
                                               "nvfp4/row+up",
                                               "e1m2/1x16",
                                               "e1m2/1x16+up",
                                               "e1m2/1x16+pow2",
                                               "e1m2/16x16",
                                               "e1m2/16x16+up",
                                               "e1m2/16x16+pow2",
                                               "e1m2/1x32",
                                               "e1m2/1x32+floor"};
  return all;
}

constexpr const char* kEden = "nvfp4+eden";  // takes no more flags

std::vector<std::string> all_specs() {
  std::vector<std::string> specs;
  for (const std::string& base : bases())
    for (const char* rounding : {"", "+sr"})
      for (const char* transform : {"", "+rht", "+rht32", "+rht64", "+rht128"})
        specs.push_back(base + rounding + transform);
  specs.push_back(kEden);
  return specs;
}

void expect_as_oracle(const Matrix& x, const Request& request) {
  for (const bool columnwise : {false, true}) {
    const Outputs got = quantized(x.ref(), request, columnwise);
    const Difference difference(x, request, columnwise, got);
    const Shape& s = x.shape();
    EXPECT_EQ(difference.text(), "")
        << request.spec.str() << (columnwise ? " columnwise" : " rowwise") << " of "
        << name_of(x.dtype()) << " " << s.batch << " x " << s.rows << " x " << s.cols;
  }
}

// The names and the flags are those of the parser's errors.
TEST(Quantize, BasesAreAllThatTheParserTakes) {
  const auto words_after = [](const char* text, const std::string& before) {
    std::string error;
    try {
      Spec::parse(text);
    } catch (const Error& caught) {
      error = caught.what();
    }
    std::istringstream list(error.substr(error.find(before) + before.size()));
    std::vector<std::string> words;
    for (std::string word; list >> word;) words.push_back(word.substr(0, word.find(',')));
    return words;
  };
  std::set<std::string> texts;
  for (const std::string& name : words_after("?", "expected one of "))
    for (const std::string& flag : words_after("nvfp4+?", "expected ")) try {
        Spec spec = Spec::parse(name + "+" + flag);
        if (spec.is_eden()) continue;
        spec.stochastic = spec.delayed = false;  // all_specs and other tests add these
        spec.transform = 0;
        texts.insert(spec.str());
      } catch (const Error&) {  // of another rule
      }
  EXPECT_EQ(texts, std::set<std::string>(bases().begin(), bases().end()));
}

TEST(Quantize, EverySpecOfBothDtypes) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Matrix x({1, 37, 150}, dtype, Kind::kWide);
    for (const std::string& spec : all_specs()) expect_as_oracle(x, {.spec = Spec::parse(spec)});
  }
}

TEST(Quantize, SizesAroundBlocksAndTiles) {
  const Shape shapes[] = {{1, 1, 1},     {1, 15, 17},   {1, 16, 16},  {1, 17, 15},
                          {1, 31, 33},   {1, 32, 32},   {1, 33, 31},  {1, 127, 129},
                          {1, 129, 127}, {1, 128, 256}, {1, 1, 1000}, {1, 1000, 1}};
  std::uint64_t seed = 1;
  for (const Shape& shape : shapes)
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const Matrix x(shape, dtype, Kind::kWide, ++seed);
      for (const std::string& base : bases()) expect_as_oracle(x, {.spec = Spec::parse(base)});
      for (const char* spec : {"nvfp4+sr", "nvfp4+sr+rht", "mxfp8+sr", "e4m3/tensor+rht128", kEden})
        expect_as_oracle(x, {.spec = Spec::parse(spec)});
    }
}

TEST(Quantize, InfinityNanDenormalsAndTheLargestFloats) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
    for (const std::uint64_t seed : {1u, 2u, 3u}) {
      const Matrix x({1, 40, 161}, dtype, Kind::kSpecial, seed);
      for (const std::string& base : bases())
        for (const char* rounding : {"", "+sr"})
          expect_as_oracle(x, {.spec = Spec::parse(base + rounding)});
      for (const char* spec :
           {"nvfp4+rht", "mxfp8+rht32", "e4m3/row+rht", "e4m3/128x128+rht64", kEden})
        expect_as_oracle(x, {.spec = Spec::parse(spec)});
    }
}

TEST(Quantize,
     EveryMagnitudeOfABlock) {  // block and tensor amax from the smallest float to the largest
  for (int exponent = -149; exponent <= 127; exponent += 3) {
    std::vector<float> values;
    for (int i = 0; i < 33; ++i)
      values.push_back(std::ldexp(i % 2 ? 1.0f : -1.0f, exponent) *
                       (1 + static_cast<float>(i) / 40));
    const Matrix x({1, 1, 33}, DType::kFloat32, values);
    for (const std::string& base : bases())
      for (const char* rounding : {"", "+sr"})
        expect_as_oracle(x, {.spec = Spec::parse(base + rounding)});
    expect_as_oracle(x, {.spec = Spec::parse(kEden)});
  }
}

TEST(Quantize, AllZeros) {
  const Matrix x({1, 20, 40}, DType::kBFloat16, std::vector<float>(800, -0.0f));
  for (const std::string& spec : all_specs()) expect_as_oracle(x, {.spec = Spec::parse(spec)});
}

TEST(Quantize, ABatchIsItsMatricesOneByOneSaveForTheRandomRows) {
  const Matrix x({3, 18, 50}, DType::kBFloat16, Kind::kWide);
  for (const std::string& spec : all_specs()) expect_as_oracle(x, {.spec = Spec::parse(spec)});
}

TEST(Quantize, AGivenAmaxReplacesTheComputedOne) {
  const Matrix x({2, 33, 40}, DType::kFloat32, Kind::kSpecial);
  for (const float amax : {0.0f, 1e-40f, 0.5f, 3.0f, 1e30f, kInfinity, kNan}) {
    const std::vector<float> given = {amax, 2.0f};
    for (const char* spec : {"e4m3/tensor", "e5m2/tensor", "nvfp4", "nvfp4/16x16+up", "nvfp4+pow2",
                             "e4m3/tensor+sr", "nvfp4+sr+rht", kEden})
      expect_as_oracle(x, {.spec = Spec::parse(spec), .given_amax = given.data()});
    const std::vector<float> rows(80, amax);
    for (const char* spec : {"e4m3/row", "e4m3/row+exact"})
      expect_as_oracle(x, {.spec = Spec::parse(spec), .given_amax = rows.data()});
  }
}

TEST(Quantize, DelayedScalingKeepsTheGivenScaleAndReportsTheCurrentAmax) {
  for (const Kind kind : {Kind::kWide, Kind::kSpecial})
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const Matrix x({2, 33, 130}, dtype, kind);
      const float given[2] = {2.5f, 0.0f};
      for (const char* spec : {"e4m3/tensor+delayed", "e5m2/tensor+delayed",
                               "e4m3/tensor+delayed+sr", "e5m2/tensor+delayed+rht"}) {
        expect_as_oracle(x, {.spec = Spec::parse(spec), .given_amax = given});
        expect_as_oracle(x, {.spec = Spec::parse(spec)});
      }
    }
}

TEST(Quantize, EmptyTensorsHaveScalesButNoCodes) {
  for (const Shape& shape : {Shape{1, 0, 16}, Shape{1, 16, 0}, Shape{0, 4, 16}, Shape{2, 0, 0}}) {
    const Matrix x(shape, DType::kFloat32, Kind::kModerate);
    for (const std::string& spec : all_specs()) expect_as_oracle(x, {.spec = Spec::parse(spec)});
  }
}

}  // namespace
}  // namespace minifloat
