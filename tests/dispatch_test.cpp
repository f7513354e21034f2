// Bad input to the public functions: an Error states what was expected, and nothing is written.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "cpu/harness.h"
#include "minifloat/error.h"
#include "minifloat/quantize.h"
#include "minifloat/transform.h"

namespace minifloat {
namespace {

// Returns the message of the Error that f throws; "" where it throws none.
std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}
bool says(const std::string& message, const std::string& part) {
  return message.find(part) != std::string::npos;
}
#define EXPECT_ERROR(expression, part)                          \
  do {                                                          \
    const std::string message = error_of([&] { expression; });  \
    EXPECT_TRUE(says(message, part)) << "message: " << message; \
  } while (false)

class Dispatch : public ::testing::Test {
 protected:
  const Matrix x_{{1, 32, 48}, DType::kBFloat16, Kind::kModerate};

  // Expects that quantize with one fault is refused, and that nothing is written.
  void expect_refused(const char* text, const std::function<void(TensorRef&, Operand&)>& spoil,
                      const char* part) {
    const Spec spec = Spec::parse(text);
    Outputs good_out(spec, x_.shape()), out(spec, x_.shape());
    const Operand good = operand_of({.spec = spec}, good_out);
    Operand bad = operand_of({.spec = spec}, out);
    TensorRef x = x_.ref();
    spoil(x, bad);
    EXPECT_ERROR(quantize(x, &bad, nullptr), part);
    EXPECT_ERROR(quantize(x, &good, &bad), part);  // the other direction is not written either
    EXPECT_TRUE(out.untouched() && good_out.untouched());
  }
};

TEST_F(Dispatch, QuantizeWithoutADirection) {
  EXPECT_ERROR(quantize(x_.ref(), nullptr, nullptr), "got neither");
}

TEST_F(Dispatch, QuantizeRefusesBadOperands) {
  expect_refused("mxfp8", [](TensorRef&, Operand& o) { o.spec = Spec(); }, "bf16 is the identity");
  expect_refused(
      "mxfp8",
      [](TensorRef&, Operand& o) {
        o.codes = nullptr;
        o.decoded = nullptr;
      },
      "buffer for the codes of mxfp8");
  expect_refused("mxfp8", [](TensorRef&, Operand& o) { o.scale = nullptr; }, "scale buffer");
  alignas(16) static std::uint16_t values[32 * 48 + 1];
  expect_refused(
      "mxfp8", [](TensorRef&, Operand& o) { o.decoded = values + 1; }, "got 2 bytes past one");
  static const float kAmax = 1;
  expect_refused(
      "mxfp8", [](TensorRef&, Operand& o) { o.given_amax = &kAmax; }, "no tensor or row amax");
  static float columns[48];
  for (const char* spec : {"mxfp8", "e4m3/tensor", "e4m3/row+rht"})
    expect_refused(
        spec, [](TensorRef&, Operand& o) { o.amaxes_of_columns = columns; },
        "untransformed scale a row");
  expect_refused(
      "nvfp4+sr", [](TensorRef&, Operand& o) { o.random.state = nullptr; }, "random state");
  expect_refused(
      "nvfp4+sr", [](TensorRef&, Operand& o) { o.random.state_size = 4; }, "2 or 3 numbers, got 4");
  expect_refused("nvfp4+sr", [](TensorRef&, Operand& o) { o.origin.col = 8; }, "multiple of 16");
  expect_refused(
      "nvfp4+rht32", [](TensorRef&, Operand& o) { o.origin.col = 16; }, "multiple of 32");
  expect_refused("nvfp4", [](TensorRef&, Operand& o) { o.origin.row = -1; }, "zero or more");
}

TEST_F(Dispatch, QuantizeRefusesBadTensors) {
  expect_refused("nvfp4", [](TensorRef& x, Operand&) { x.rows = -1; }, "zero or more");
  expect_refused("nvfp4", [](TensorRef& x, Operand&) { x.data = nullptr; }, "got null");
  expect_refused("nvfp4", [](TensorRef& x, Operand&) { x.row_stride = 47; }, "row stride");
}

TEST_F(Dispatch, Amax) {
  Guarded<float> out(1);
  EXPECT_ERROR(amax(x_.ref(), {Spec::parse("mxfp8")}, out.data()), "no tensor or row amax");
  EXPECT_TRUE(out.untouched());
}

#if !defined(MINIFLOAT_WITH_CUDA)
TEST_F(Dispatch, RefusesCudaTensorsWithoutACudaBackend) {
  expect_refused("nvfp4", [](TensorRef& x, Operand&) { x.device = Device::kCuda; }, "CUDA");
  Guarded<float> out(16);
  TensorRef x = x_.ref();
  x.device = Device::kCuda;
  EXPECT_ERROR(amax(x, {Spec::parse("nvfp4")}, out.data()), "expected a tensor on the CPU");
  const std::uint8_t codes[16] = {}, scale[1] = {};
  const Quantized q = {.spec = Spec::parse("mxfp8"),
                       .codes = codes,
                       .scale = scale,
                       .rows = 1,
                       .cols = 16,
                       .device = Device::kCuda};
  EXPECT_ERROR(dequantize(q, DType::kFloat32, out.data()), "CPU");
  EXPECT_ERROR(decode_for_product(q, reinterpret_cast<std::uint16_t*>(out.data())), "CPU");
  EXPECT_TRUE(out.untouched());
}
#endif

TEST_F(Dispatch, Dequantize) {
  Guarded<float> out(16);
  const std::uint8_t codes[8] = {}, scale[1] = {};
  Quantized q = {
      .spec = Spec::parse("nvfp4"), .codes = codes, .scale = scale, .rows = 1, .cols = 16};
  EXPECT_ERROR(dequantize(q, DType::kFloat32, out.data()), "needs the amax");
  EXPECT_ERROR(tensor_factor(q, out.data()), "needs the amax");
  EXPECT_ERROR(product_factor(Quantized{}, q, out.data()), "needs the amax");
  EXPECT_ERROR(product_factor(Quantized{}, {.spec = {}, .batch = 2}, out.data()),
               "one factor each");
  q.codes = nullptr;
  EXPECT_ERROR(dequantize(q, DType::kFloat32, out.data()), "got null");
  q.codes = codes;
  q.rows = -1;
  EXPECT_ERROR(dequantize(q, DType::kFloat32, out.data()), "zero or more");
  q.rows = 1;
  q.spec = Spec();
  EXPECT_ERROR(dequantize(q, DType::kFloat32, out.data()), "bf16");
  EXPECT_TRUE(out.untouched());
}

TEST_F(Dispatch, Fp4AsFp8) {
  Guarded<float> row_scale(1);
  Guarded<std::uint8_t> out(16);
  const std::uint8_t codes[16] = {}, scale[1] = {};
  for (const char* text : {"nvfp4", "nvfp4+up", "mxfp8", "e4m3/row"}) {
    const float amax[1] = {1};
    const Quantized q = {.spec = Spec::parse(text),
                         .codes = codes,
                         .scale = scale,
                         .amax = amax,
                         .rows = 1,
                         .cols = 16};
    EXPECT_ERROR(fp4_as_fp8({q, out.data(), row_scale.data()}),
                 "expected 4-bit codes under powers of two");
  }
  const Quantized q = {
      .spec = Spec::parse("nvfp4+pow2"), .codes = codes, .scale = scale, .rows = 1, .cols = 16};
  EXPECT_ERROR(fp4_as_fp8({q, out.data(), row_scale.data()}), "needs the amax");
  EXPECT_TRUE(out.untouched() && row_scale.untouched());
}

TEST_F(Dispatch, Transforms) {
  Guarded<std::uint16_t> out(16);
  EXPECT_ERROR(hadamard(x_.ref(), 8, false, kHadamardSigns, out.data()),
               "16, 32, 64 or 128 points, got 8");
  Guarded<std::uint8_t> bytes(4096);
  const std::uint8_t scale[64] = {};
  EXPECT_ERROR(swizzle_scales({.rows = -1, .cols = 4}, scale, bytes.data()), "zero or more");
  for (const std::vector<std::int32_t>& ends :
       {std::vector<std::int32_t>{5, 3, 8}, {4, 9}, {-1, 8}}) {  // falls, past the end, negative
    const ScaleMatrix shape = {.rows = 8,
                               .cols = 4,
                               .kind = ScaleGroups::kAlongM,
                               .offsets = ends.data(),
                               .groups = static_cast<std::int64_t>(ends.size())};
    EXPECT_ERROR(swizzle_scales(shape, scale, bytes.data()), "group");
    EXPECT_ERROR(unswizzle_scales(shape, scale, bytes.data()), "group");
  }
  EXPECT_ERROR(transpose_nibbles({.codes = scale, .rows = -2, .cols = 2}, bytes.data()),
               "zero or more");
  EXPECT_TRUE(out.untouched() && bytes.untouched());
}

}  // namespace
}  // namespace minifloat
