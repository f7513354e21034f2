// dequantize, decode_for_product and tensor_factor: against the oracle for every spec, and as the
// inverse of quantize, within the bound of each format's rounding.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "harness.h"
#include "minifloat/quantize.h"

namespace minifloat {
namespace {

const char* const kSpecs[] = {"e4m3/tensor",
                              "e5m2/tensor",
                              "e4m3/tensor+delayed",
                              "e4m3/row",
                              "e4m3/row+exact",
                              "e4m3/1x128",
                              "e4m3/128x128",
                              "mxfp8",
                              "mxfp8/e5m2",
                              "mxfp8/32x32",
                              "mxfp8+floor",
                              "mxfp4",
                              "mxfp4+sr",
                              "nvfp4",
                              "nvfp4/16x16",
                              "nvfp4+up",
                              "nvfp4+pow2",
                              "nvfp4+sr+rht",
                              "mxfp4+rht32",
                              "e4m3/row+rht64",
                              "nvfp4/16x16+up",
                              "mxfp8/e5m2+rht128",
                              "e4m3/1x128+exact",
                              "e4m3/128x128+exact",
                              "nvfp4/row",
                              "nvfp4/row+up+sr"};

Quantized operand(const Spec& spec, const Outputs& out, Shape read) {
  return {.spec = spec,
          .codes = out.codes.data(),
          .scale = out.scale.data(),
          .amax = out.amax.size() > 0 ? out.amax.data() : nullptr,
          .batch = read.batch,
          .rows = read.rows,
          .cols = read.cols};
}

TEST(Dequantize, ValuesAsTheOracle) {
  for (const Shape& shape :
       {Shape{1, 33, 161}, Shape{2, 17, 31}, Shape{1, 1, 1}, Shape{1, 130, 128}})
    for (const Kind kind : {Kind::kWide, Kind::kSpecial}) {
      const Matrix x(shape, DType::kFloat32, kind);
      for (const char* text : kSpecs) {
        const Request request{.spec = Spec::parse(text)};
        const Outputs out = quantized(x.ref(), request, false);
        const Quantized q = operand(request.spec, out, shape);
        const std::int64_t padded = request.spec.padded_cols(shape.cols);
        Guarded<float> fp32(shape.batch * shape.rows * padded);
        Guarded<std::uint16_t> bf16(shape.batch * shape.rows * padded), product = bf16;
        dequantize(q, DType::kFloat32, fp32.data());
        dequantize(q, DType::kBFloat16, bf16.data());
        if (!request.spec.has_fp32_values()) decode_for_product(q, product.data());
        EXPECT_TRUE(fp32.guards_hold() && bf16.guards_hold() && product.guards_hold()) << text;
        std::size_t i = 0;
        for (std::int64_t e = 0; e < shape.batch; ++e) {
          const oracle::Operand want = oracle::Quantizer(
              request.spec, {.key = oracle::mixed_seed(kSeedAndCount[0], kSeedAndCount[1]),
                             .stream = request.stream,
                             .first_row = e * shape.rows})(x.as_read(e, false));
          for (std::size_t k = 0; k < want.values.size(); ++k, ++i) {
            ASSERT_TRUE(same_float(fp32[i], want.values[k]))
                << text << ", entry " << i << ": expected " << want.values[k] << ", got "
                << fp32[i];
            ASSERT_TRUE(same_bf16(bf16[i], oracle::to_bf16(want.values[k])))
                << text << ", entry " << i;
            ASSERT_TRUE(request.spec.has_fp32_values() || same_bf16(product[i], want.decoded[k]))
                << text << ", entry " << i;
          }
        }
        EXPECT_TRUE(request.spec.has_fp32_values() || product == out.decoded)
            << text << ": quantize's decoded output differs";
      }
    }
}

TEST(Dequantize, TensorFactorIsThePendingFactor) {
  const Matrix x({2, 20, 50}, DType::kBFloat16, Kind::kModerate);
  for (const char* text : kSpecs) {
    const Request request{.spec = Spec::parse(text)};
    const Outputs out = quantized(x.ref(), request, false);
    const Quantized q = operand(request.spec, out, x.shape());
    std::vector<float> factor(static_cast<std::size_t>(q.factors()));
    tensor_factor(q, factor.data());
    ASSERT_EQ(factor.size(), request.spec.rule == ScaleRule::kNvfp4Row ? 40u : 2u) << text;
    for (std::size_t e = 0; e < factor.size(); ++e) {
      float want = 1;
      if (request.spec.rule == ScaleRule::kTensor) want = out.fp32_scale(e);
      if (request.spec.has_outer_amax())
        want = oracle::nvfp4_tensor(oracle::grid(request.spec.elements).format(), out.amax[e],
                                    request.spec.scale_rounding)
                   .scale;
      EXPECT_EQ(factor[e], want) << text;
    }
  }
}

TEST(Dequantize, ProductFactorIsZeroAndTheProductOfTwoTensorFactors) {
  const Matrix x({1, 20, 50}, DType::kBFloat16, Kind::kModerate),
      y({1, 7, 50}, DType::kFloat32, Kind::kModerate, 5);
  for (const char* text_a : kSpecs)
    for (const char* text_b : kSpecs) {
      const Request a{.spec = Spec::parse(text_a)}, b{.spec = Spec::parse(text_b)};
      // Factors of rows are no factor of a whole product.
      if (a.spec.rule == ScaleRule::kNvfp4Row || b.spec.rule == ScaleRule::kNvfp4Row) continue;
      const Outputs out_a = quantized(x.ref(), a, false), out_b = quantized(y.ref(), b, false);
      const Quantized q_a = operand(a.spec, out_a, x.shape()),
                      q_b = operand(b.spec, out_b, y.shape());
      float of_a = 0, of_b = 0, both[2] = {-1, -1};
      tensor_factor(q_a, &of_a);
      tensor_factor(q_b, &of_b);
      product_factor(q_a, q_b, both);
      EXPECT_EQ(both[0], 0.0f);
      EXPECT_EQ(both[1], of_a * of_b) << text_a << " by " << text_b;
      product_factor(q_a, Quantized{}, both);
      EXPECT_EQ(both[1], of_a) << text_a << " alone";
    }
}

// Returns the largest |x - dequantized| of a block, over the block's amax.
double worst_error(const char* text, Kind kind) {
  const Shape shape{1, 128, 256};
  const Matrix x(shape, DType::kFloat32, kind, 11);
  const Spec spec = Spec::parse(text);
  const Outputs out = quantized(x.ref(), {.spec = spec}, false);
  Guarded<float> values(shape.elements());
  dequantize(operand(spec, out, shape), DType::kFloat32, values.data());
  const std::int64_t height = spec.has_blocks()     ? spec.block_rows
                              : spec.has_row_amax() ? 1
                                                    : shape.rows;
  const std::int64_t width = spec.has_blocks() ? spec.block_cols : shape.cols;
  double worst = 0;
  for (std::int64_t r = 0; r < shape.rows; r += height)
    for (std::int64_t c = 0; c < shape.cols; c += width) {
      double amax = 0, error = 0;
      for (std::int64_t i = r; i < r + height; ++i)
        for (std::int64_t j = c; j < c + width; ++j) {
          amax = std::max(amax, std::fabs(double{x.at(0, i, j)}));
          error = std::max(error, std::fabs(double{x.at(0, i, j)} -
                                            values[static_cast<std::size_t>(i * shape.cols + j)]));
        }
      if (amax > 0) worst = std::max(worst, error / amax);
    }
  return worst;
}

TEST(Dequantize, ErrorsStayWithinHalfAStepOfTheLargestBinade) {
  // With p mantissa bits, half a step next to the largest value is 2^-(p + 1) of its binade: at
  // most that much of the amax, which lies in this binade or, scaled by a power of two, up to a
  // factor 2 / (max's mantissa) below.
  EXPECT_LE(worst_error("e4m3/tensor", Kind::kWide), 0x1p-4);
  EXPECT_LE(worst_error("e5m2/tensor", Kind::kWide), 0x1p-3);
  EXPECT_LE(worst_error("e4m3/row+exact", Kind::kWide), 0x1p-4);
  EXPECT_LE(worst_error("e4m3/row", Kind::kWide), 0x1p-4);
  EXPECT_LE(worst_error("e4m3/1x128", Kind::kWide), 0x1p-4);
  EXPECT_LE(worst_error("e4m3/128x128", Kind::kWide), 0x1p-4);
  EXPECT_LE(worst_error("mxfp8", Kind::kWide), 0x1p-4);
  EXPECT_LE(worst_error("mxfp8/e5m2", Kind::kWide), 0x1p-3);
  EXPECT_LE(worst_error("mxfp8/32x32", Kind::kWide), 0x1p-4);
  EXPECT_LE(worst_error("mxfp4", Kind::kWide),
            1.0 / 3 + 1e-6);  // amax just over 3, scaled to 6: 5 -> 4 or 6
  EXPECT_LE(worst_error("mxfp8+floor", Kind::kWide), 1 - 448.0 / 512);  // saturation
  EXPECT_LE(worst_error("nvfp4+up", Kind::kModerate), 1.0 / 4);
  EXPECT_LE(worst_error("nvfp4", Kind::kModerate), 1.0 / 5);
}

TEST(Dequantize, StochasticRoundingIsUnbiased) {
  // 0.3 of the way from 4 to 6 (amax 6 in each block), about 2^16 times: the fraction that is
  // rounded up is within 5 standard deviations, each sqrt(0.3 * 0.7 / 2^16), of 0.3.
  std::vector<float> values(1 << 16, 4.6f);
  for (std::size_t i = 0; i < values.size(); i += 16) values[i] = 6;
  const Shape shape{1, 256, 256};
  const Matrix x(shape, DType::kFloat32, values);
  const Spec spec = Spec::parse("nvfp4+sr");
  const Outputs out = quantized(x.ref(), {.spec = spec}, false);
  Guarded<float> decoded(shape.elements());
  dequantize(operand(spec, out, shape), DType::kFloat32, decoded.data());
  double up = 0, count = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] == 6) continue;
    up += decoded[i] > 5;
    ++count;
  }
  EXPECT_NEAR(up / count, 0.3, 5 * std::sqrt(0.3 * 0.7 / count));
}

TEST(Dequantize, EmptyOperands) {
  for (const Shape& shape : {Shape{1, 0, 16}, Shape{1, 16, 0}, Shape{0, 4, 16}})
    for (const char* text : kSpecs) {
      const Spec spec = Spec::parse(text);
      const Matrix x(shape, DType::kFloat32, Kind::kModerate);
      const Outputs out = quantized(x.ref(), {.spec = spec}, false);
      Guarded<float> values(0);
      dequantize(operand(spec, out, shape), DType::kFloat32, values.data());
      EXPECT_TRUE(values.untouched());
    }
}

}  // namespace
}  // namespace minifloat
