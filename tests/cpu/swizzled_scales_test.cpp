// Casts with Operand::swizzled: the scales of a cast without it, moved by swizzle_scales.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "harness.h"
#include "minifloat/core/swizzle.h"
#include "minifloat/error.h"
#include "minifloat/quantize.h"
#include "minifloat/transform.h"

namespace minifloat {
namespace {

// Returns row-major scales with those of 2D blocks once for each row.
std::vector<std::uint8_t> scales_of_rows(const Spec& spec, const Outputs& out, const Shape& read) {
  const std::int64_t cols = spec.scale_cols(read.cols);
  std::vector<std::uint8_t> rows;
  for (std::int64_t e = 0; e < read.batch; ++e)
    for (std::int64_t r = 0; r < read.rows; ++r)
      for (std::int64_t c = 0; c < cols; ++c)
        rows.push_back(out.scale[static_cast<std::size_t>(
            (e * spec.scale_rows(read.rows) + r / spec.block_rows) * cols + c)]);
  return rows;
}

void expect_swizzled(const std::string& text, const Matrix& x, bool columnwise) {
  const Request request{.spec = Spec::parse(text)};
  const Spec& spec = request.spec;
  Outputs plain = quantized(x.ref(), request, columnwise);
  const Shape read = read_shape(x.shape(), columnwise);
  const std::int64_t cols = spec.scale_cols(read.cols),
                     bytes = read.batch * swizzled_size(read.rows, cols);
  const std::vector<std::uint8_t> rows = scales_of_rows(spec, plain, read);
  Guarded<std::uint8_t> want(bytes), got(bytes),
      codes(static_cast<std::int64_t>(plain.codes.size()));
  swizzle_scales({.batch = read.batch, .rows = read.rows, .cols = cols}, rows.data(), want.data());

  Operand to = operand_of(request, plain);
  to.swizzled = true;
  to.scale = got.data(), to.codes = codes.data();
  quantize(x.ref(), columnwise ? nullptr : &to, columnwise ? &to : nullptr);
  ASSERT_TRUE(got.guards_hold() && codes.guards_hold()) << text;
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], want[i]) << text << ", byte " << i;
  for (std::size_t i = 0; i < codes.size(); ++i) ASSERT_EQ(codes[i], plain.codes[i]) << text;
}

TEST(SwizzledScales, AreThoseOfACastInTheLayout) {
  for (const char* text : {"mxfp8", "mxfp8/32x32", "mxfp4+sr+rht32", "nvfp4", "nvfp4/16x16+4over6",
                           "nvfp4+eden", "nvfp4/row"})
    for (const Shape& shape :
         {Shape{1, 1, 1}, Shape{1, 128, 128}, Shape{1, 131, 333}, Shape{3, 33, 161}})
      for (const bool columnwise : {false, true})
        expect_swizzled(text, Matrix(shape, DType::kFloat32, Kind::kModerate), columnwise);
}

TEST(SwizzledScales, OfOtherOperandsThrow) {
  const Matrix x(Shape{1, 32, 32}, DType::kFloat32, Kind::kModerate);
  const auto expect_refused = [&](const char* text, auto change) {
    const Request request{.spec = Spec::parse(text)};
    Outputs out = quantized(x.ref(), request, false);
    Guarded<std::uint8_t> scale(32 * 512);
    Operand to = operand_of(request, out);
    to.swizzled = true, to.scale = scale.data(), to.decoded = nullptr;
    change(to);
    EXPECT_THROW(quantize(x.ref(), &to, nullptr), Error) << text;
  };
  for (const char* text : {"e4m3/tensor", "e4m3/row", "e4m3/1x128"})
    expect_refused(text, [](Operand&) {});
  expect_refused("mxfp4", [](Operand& to) { to.as_fp8 = true; });
  expect_refused("mxfp8", [](Operand& to) { to.row_bytes = 64; });
}

}  // namespace
}  // namespace minifloat
