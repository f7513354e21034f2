// fp4_as_fp8 against the operand's parts: each row's exponent, factor and codes computed in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "harness.h"
#include "minifloat/error.h"
#include "minifloat/quantize.h"

namespace minifloat {
namespace {

constexpr int kNone = -100000;  // no exponent: NaN and zero scales

const oracle::Grid& e4m3() { return oracle::grid(Elements::kE4m3); }

// Returns log2 of a block's scale.
int exponent_of(const Spec& spec, unsigned scale) {
  if (spec.rule == ScaleRule::kMx) return scale == 0xFF ? kNone : static_cast<int>(scale) - 127;
  return scale == 0x7F || scale == 0 ? kNone : std::ilogb(e4m3()[scale]);
}
bool is_nan_scale(const Spec& spec, unsigned scale) {
  return scale == (spec.rule == ScaleRule::kMx ? 0xFFu : 0x7Fu);
}

// The exponent T of a format's codes as FP8, and the least K of a row.
struct OfFormat {
  int top, least;
};
OfFormat of_format(const Spec& spec) {
  return spec.elements == Elements::kE1m2 ? OfFormat{8, -118} : OfFormat{6, -120};
}

struct Fp8Rows {
  Guarded<std::uint8_t> codes;
  Guarded<float> row_scale;
};

void expect_as_worked_out(const std::string& text, const Matrix& x) {
  const Request request{.spec = Spec::parse(text)};
  const Spec& spec = request.spec;
  const Shape shape = x.shape();
  const Outputs out = quantized(x.ref(), request, false);
  const Quantized q = {.spec = spec,
                       .codes = out.codes.data(),
                       .scale = out.scale.data(),
                       .amax = out.amax.size() > 0 ? out.amax.data() : nullptr,
                       .batch = shape.batch,
                       .rows = shape.rows,
                       .cols = shape.cols};
  const std::int64_t padded = spec.padded_cols(shape.cols), rows = shape.batch * shape.rows;
  Fp8Rows got = {Guarded<std::uint8_t>(rows * padded), Guarded<float>(rows)};
  fp4_as_fp8({q, got.codes.data(), got.row_scale.data()});
  ASSERT_TRUE(got.codes.guards_hold() && got.row_scale.guards_hold()) << text;

  std::vector<float> tensor_scale(static_cast<std::size_t>(shape.batch));
  tensor_factor(q, tensor_scale.data());
  const std::int64_t blocks = spec.scale_cols(shape.cols);
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t e = row / shape.rows, block_row = e * spec.scale_rows(shape.rows) +
                                                         row % shape.rows / spec.block_rows;
    const auto scale_of = [&](std::int64_t c) {
      return out.scale[static_cast<std::size_t>(block_row * blocks + c / spec.block_cols)];
    };
    int largest = kNone;
    for (std::int64_t c = 0; c < padded; ++c)
      largest = std::max(largest, exponent_of(spec, scale_of(c)));
    const int top = largest == kNone ? 0 : std::max(largest, of_format(spec).least);
    const float want_scale = oracle::fl32(
        std::ldexp(double{tensor_scale[static_cast<std::size_t>(e)]}, top - of_format(spec).top));
    ASSERT_TRUE(same_float(got.row_scale[static_cast<std::size_t>(row)], want_scale))
        << text << ", row " << row;
    for (std::int64_t c = 0; c < padded; ++c) {
      const unsigned pair =
          out.codes[static_cast<std::size_t>(row * spec.code_cols(shape.cols) + c / 2)];
      const unsigned code = c % 2 ? pair >> 4 : pair & 0xF, scale = scale_of(c);
      const int k = exponent_of(spec, scale);
      const double magnitude = k == kNone ? 0
                                          : std::ldexp(oracle::grid(spec.elements)[code & 7],
                                                       k - top + of_format(spec).top);
      const unsigned want = is_nan_scale(spec, scale)
                                ? 0x7F
                                : (code & 8) << 4 | e4m3().nearest(static_cast<float>(magnitude));
      ASSERT_EQ(got.codes[static_cast<std::size_t>(row * padded + c)], want)
          << text << ", row " << row << ", column " << c;
    }
  }
}

TEST(Fp4AsFp8, RowsFactorsAndCodes) {
  for (const char* text : {"mxfp4", "mxfp4+floor", "mxfp4+sr+rht", "mxfp4+rht32", "nvfp4+pow2",
                           "nvfp4/16x16+pow2", "nvfp4+pow2+sr+rht", "e1m2/1x32", "e1m2/1x32+sr+rht",
                           "e1m2/1x16+pow2", "e1m2/16x16+pow2", "e1m2/1x16+pow2+sr+rht"})
    for (const Shape& shape :
         {Shape{1, 1, 1}, Shape{1, 33, 161}, Shape{2, 17, 48}, Shape{1, 64, 256}})
      for (const Kind kind : {Kind::kModerate, Kind::kWide, Kind::kSpecial})
        expect_as_worked_out(text, Matrix(shape, DType::kFloat32, kind));
}

TEST(Fp4AsFp8, ZeroAndTinyRows) {
  const Shape shape{1, 2, 64};
  for (const float value : {0.0f, 0x1p-149f, 0x1p-126f, 0x1p-120f, kInfinity, kNan})
    for (const char* text : {"mxfp4", "nvfp4+pow2", "e1m2/1x32", "e1m2/1x16+pow2"})
      expect_as_worked_out(text, Matrix(shape, DType::kFloat32, std::vector<float>(128, value)));
}

// Expects a cast that writes FP8 to give the bytes of a cast and a conversion.
void expect_cast_as_converted(const std::string& text, const Matrix& x, bool columnwise) {
  const Request request{.spec = Spec::parse(text)};
  const Spec& spec = request.spec;
  const Shape read = read_shape(x.shape(), columnwise);
  Outputs fp4 = quantized(x.ref(), request, columnwise);
  const std::int64_t size = read.batch * read.rows * spec.padded_cols(read.cols);
  Fp8Rows want = {Guarded<std::uint8_t>(size), Guarded<float>(read.batch * read.rows)};
  Fp8Rows got = {Guarded<std::uint8_t>(size), Guarded<float>(read.batch * read.rows)};
  fp4_as_fp8({{.spec = spec,
               .codes = fp4.codes.data(),
               .scale = fp4.scale.data(),
               .amax = fp4.amax.size() > 0 ? fp4.amax.data() : nullptr,
               .batch = read.batch,
               .rows = read.rows,
               .cols = read.cols},
              want.codes.data(),
              want.row_scale.data()});
  for (const bool has_amax : {true, false}) {
    Operand to = operand_of(request, fp4);
    Guarded<float> amax(static_cast<std::int64_t>(fp4.amax.size()));
    to.as_fp8 = true;
    to.codes = got.codes.data(), to.scale = got.row_scale.data(), to.decoded = nullptr;
    to.amax = has_amax && to.amax ? amax.data() : nullptr;
    quantize(x.ref(), columnwise ? nullptr : &to, columnwise ? &to : nullptr);
    ASSERT_TRUE(got.codes.guards_hold() && got.row_scale.guards_hold()) << text;
    for (std::size_t i = 0; i < got.codes.size(); ++i)
      ASSERT_EQ(got.codes[i], want.codes[i]) << text << ", entry " << i;
    for (std::size_t i = 0; i < got.row_scale.size(); ++i)
      ASSERT_TRUE(same_float(got.row_scale[i], want.row_scale[i])) << text << ", row " << i;
    for (std::size_t i = 0; to.amax && i < amax.size(); ++i)
      ASSERT_TRUE(same_float(amax[i], fp4.amax[i])) << text;
  }
}

TEST(Fp4AsFp8, CastsWriteConvertedCodes) {
  for (const char* text :
       {"mxfp4", "mxfp4+sr+rht", "nvfp4+pow2", "nvfp4/16x16+pow2", "nvfp4+pow2+sr",
        "nvfp4+pow2+sr+rht", "e1m2/1x32+sr+rht", "e1m2/16x16+pow2", "e1m2/1x16+pow2+sr+rht"})
    for (const Shape& shape : {Shape{1, 1, 1}, Shape{1, 33, 161}, Shape{2, 17, 48}})
      for (const Kind kind : {Kind::kModerate, Kind::kWide, Kind::kSpecial})
        for (const bool columnwise : {false, true})
          expect_cast_as_converted(text, Matrix(shape, DType::kFloat32, kind), columnwise);
}

TEST(Fp4AsFp8, CastsOfOtherSpecsThrow) {
  const Matrix x(Shape{1, 2, 32}, DType::kFloat32, Kind::kModerate);
  for (const char* text : {"nvfp4", "e1m2/1x16", "mxfp8", "e4m3/row"}) {
    const Request request{.spec = Spec::parse(text)};
    Outputs out = quantized(x.ref(), request, false);
    Operand to = operand_of(request, out);
    to.as_fp8 = true;
    EXPECT_THROW(quantize(x.ref(), &to, nullptr), Error) << text;
  }
  const Request request{.spec = Spec::parse("mxfp4")};
  Outputs out = quantized(x.ref(), request, false);
  Operand to = operand_of(request, out);
  to.as_fp8 = true;  // beside decoded values
  EXPECT_THROW(quantize(x.ref(), &to, nullptr), Error);
}

// In normal data no block lies as far below its row's largest scale as 2^-14.
TEST(Fp4AsFp8, KeepsTheValuesOfModerateData) {
  const Shape shape{1, 48, 192};
  const Matrix x(shape, DType::kFloat32, Kind::kModerate);
  for (const char* text : {"mxfp4", "nvfp4/16x16+pow2", "e1m2/1x16+pow2"}) {
    const Request request{.spec = Spec::parse(text)};
    const Outputs out = quantized(x.ref(), request, false);
    const Quantized q = {.spec = request.spec,
                         .codes = out.codes.data(),
                         .scale = out.scale.data(),
                         .amax = out.amax.data(),
                         .rows = shape.rows,
                         .cols = shape.cols};
    Guarded<float> values(shape.elements()), row_scale(shape.rows);
    Guarded<std::uint8_t> codes(shape.elements());
    dequantize(q, DType::kFloat32, values.data());
    fp4_as_fp8({q, codes.data(), row_scale.data()});
    for (std::size_t i = 0; i < codes.size(); ++i) {
      const float magnitude = oracle::fl32(e4m3()[codes[i] & 0x7F] *
                                           row_scale[i / static_cast<std::size_t>(shape.cols)]);
      ASSERT_EQ(codes[i] & 0x80 ? -magnitude : magnitude, values[i]) << text << ", entry " << i;
    }
  }
}

}  // namespace
}  // namespace minifloat
