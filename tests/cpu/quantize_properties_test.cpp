// Properties of quantize for all numbers: directions, batches, shards, threads and strides never
// change a byte. Then a few blocks worked by hand.
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "harness.h"
#include "minifloat/quantize.h"

namespace minifloat {
namespace {

const char* const kSpecs[] = {
    "e4m3/tensor",  "e5m2/tensor+sr", "e4m3/row",      "e4m3/row+exact+sr", "e4m3/1x128",
    "e4m3/128x128", "mxfp8",          "mxfp8/e5m2+sr", "mxfp8/32x32",       "mxfp4+sr+rht",
    "mxfp4+floor",  "nvfp4",          "nvfp4/16x16",   "nvfp4+up+rht128",   "nvfp4+sr",
    "nvfp4+sr+rht", "nvfp4/16x16+sr", "nvfp4+pow2",    "mxfp8+sr+rht64"};

// ---- Directions ---------------------------------------------------------------------------------
TEST(QuantizeProperties, BothDirectionsEqualEachAlone) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Matrix x({2, 150, 133}, dtype, Kind::kSpecial);
    for (const char* row : kSpecs) {
      const Request a{.spec = Spec::parse(row)},
          b{.spec = Spec::parse("nvfp4+sr+rht"), .stream = 9};
      Outputs row_out(a.spec, read_shape(x.shape(), false)),
          col_out(b.spec, read_shape(x.shape(), true));
      const Operand row_operand = operand_of(a, row_out), col_operand = operand_of(b, col_out);
      quantize(x.ref(), &row_operand, &col_operand);
      EXPECT_TRUE(row_out == quantized(x.ref(), a, false)) << row;
      EXPECT_TRUE(col_out == quantized(x.ref(), b, true)) << row;
    }
  }
}

TEST(QuantizeProperties, ColumnwiseIsRowwiseOfTheTranspose) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
    for (const Shape& shape : {Shape{1, 150, 133}, Shape{2, 17, 300}, Shape{1, 256, 16}}) {
      const Matrix x(shape, dtype, Kind::kSpecial);
      const Matrix t = x.transposed();
      for (const char* spec : kSpecs) {
        const Request request{.spec = Spec::parse(spec)};
        EXPECT_TRUE(quantized(x.ref(), request, true) == quantized(t.ref(), request, false))
            << spec;
      }
    }
}

TEST(QuantizeProperties, OutputsThatAreNotWantedChangeNothingElse) {
  const Matrix x({1, 70, 90}, DType::kBFloat16, Kind::kWide);
  for (const char* spec : kSpecs)
    for (const bool columnwise : {false, true}) {
      const Request request{.spec = Spec::parse(spec)};
      const Outputs all = quantized(x.ref(), request, columnwise);
      Outputs bare(request.spec, read_shape(x.shape(), columnwise));
      Operand operand = operand_of(request, bare);
      operand.amax = nullptr;
      operand.decoded = nullptr;
      quantize(x.ref(), columnwise ? nullptr : &operand, columnwise ? &operand : nullptr);
      EXPECT_TRUE(bare.codes == all.codes && bare.scale == all.scale) << spec;
      EXPECT_TRUE(bare.amax.untouched() && bare.decoded.untouched()) << spec;
    }
}

// ---- Memory -------------------------------------------------------------------------------------
TEST(QuantizeProperties, StridesOfTheInputDoNotMatter) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Matrix tight({3, 40, 50}, dtype, Kind::kWide),
        loose({3, 40, 50}, dtype, Kind::kWide, 1, 13);
    for (const char* spec : kSpecs)
      for (const bool columnwise : {false, true}) {
        const Request request{.spec = Spec::parse(spec)};
        EXPECT_TRUE(quantized(tight.ref(), request, columnwise) ==
                    quantized(loose.ref(), request, columnwise))
            << spec;
      }
  }
}

TEST(QuantizeProperties, AnOddAddressDoesNotMatter) {  // no more alignment than the element's own
  const Matrix x({1, 33, 65}, DType::kBFloat16, Kind::kWide);
  TensorRef shifted = x.ref();  // from column 1 on
  shifted.data = static_cast<const std::uint16_t*>(shifted.data) + 1;
  shifted.cols = 64;
  std::vector<float> values;
  for (std::int64_t r = 0; r < 33; ++r)
    for (std::int64_t c = 1; c < 65; ++c) values.push_back(x.at(0, r, c));
  const Matrix copy({1, 33, 64}, DType::kBFloat16, values);
  for (const char* spec : kSpecs)
    for (const bool columnwise : {false, true}) {
      const Request request{.spec = Spec::parse(spec)};
      EXPECT_TRUE(quantized(shifted, request, columnwise) ==
                  quantized(copy.ref(), request, columnwise))
          << spec;
    }
}

// ---- Random positions ---------------------------------------------------------------------------
// Returns the rows [row, row + rows) and columns [col, col + cols) of x, as a view.
TensorRef view(const Matrix& x, std::int64_t row, std::int64_t col, std::int64_t rows,
               std::int64_t cols) {
  TensorRef v = x.ref();
  const std::int64_t skip = row * v.row_stride + col;
  v.data = v.dtype == DType::kFloat32
               ? static_cast<const void*>(static_cast<const float*>(v.data) + skip)
               : static_cast<const void*>(static_cast<const std::uint16_t*>(v.data) + skip);
  v.rows = rows;
  v.cols = cols;
  return v;
}

// Returns the block of rows and columns of a byte matrix.
std::vector<std::uint8_t> cut(const Guarded<std::uint8_t>& from, std::int64_t pitch,
                              std::int64_t row, std::int64_t col, std::int64_t rows,
                              std::int64_t cols) {
  std::vector<std::uint8_t> out;
  for (std::int64_t r = row; r < row + rows; ++r)
    for (std::int64_t c = col; c < col + cols; ++c)
      out.push_back(from[static_cast<std::size_t>(r * pitch + c)]);
  return out;
}

TEST(QuantizeProperties, AShardWithItsOriginIsASliceOfTheWhole) {
  const std::int64_t rows = 320, cols = 384;
  const Matrix x({1, rows, cols}, DType::kBFloat16, Kind::kWide);
  const float amax = 500;
  for (const char* text :
       {"nvfp4+sr", "nvfp4/16x16+sr", "nvfp4+sr+rht", "nvfp4+sr+rht128", "mxfp4+sr", "mxfp8+sr",
        "mxfp8/32x32+sr", "e4m3/tensor+sr", "e4m3/128x128+sr", "nvfp4"})
    for (const bool columnwise : {false, true}) {
      const Spec spec = Spec::parse(text);
      const float* given = spec.has_tensor_amax() ? &amax : nullptr;
      const std::int64_t read_cols = columnwise ? rows : cols;
      const Outputs whole = quantized(x.ref(), {.spec = spec, .given_amax = given}, columnwise);
      for (const std::int64_t row : {0, 128, 256})
        for (const std::int64_t col : {0, 128}) {  // of the shard, in the operand as read
          const std::int64_t r = columnwise ? col : row, c = columnwise ? row : col;
          const TensorRef shard = view(x, r, c, 64, 128);
          const Outputs part = quantized(
              shard, {.spec = spec, .given_amax = given, .origin = {.row = row, .col = col}},
              columnwise);
          const std::int64_t height = columnwise ? 128 : 64, width = columnwise ? 64 : 128;
          const std::int64_t pack = spec.elements == Elements::kE2m1 ? 2 : 1;
          const std::int64_t stored = spec.padded_cols(width) / pack;
          if (spec.padded_cols(width) != width) continue;  // a shard that is not whole transforms
          EXPECT_EQ(cut(part.codes, stored, 0, 0, height, stored),
                    cut(whole.codes, read_cols / pack, row, col / pack, height, stored))
              << text << (columnwise ? " columnwise" : " rowwise") << " at " << row << ", " << col;
        }
    }
}

TEST(QuantizeProperties, SeedCountAndStreamAllMatter) {
  const Matrix x({1, 32, 64}, DType::kBFloat16, Kind::kModerate);
  const Spec spec = Spec::parse("nvfp4+sr");
  const auto codes = [&](std::vector<std::int64_t> state, std::uint64_t stream) {
    Outputs out(spec, x.shape());
    Operand operand = operand_of({.spec = spec, .stream = stream}, out);
    operand.random.state = state.data();
    operand.random.state_size = static_cast<int>(state.size());
    quantize(x.ref(), &operand, nullptr);
    return out.codes;
  };
  EXPECT_TRUE(codes({1, 2}, 3) == codes({1, 2}, 3));
  EXPECT_FALSE(codes({1, 2}, 3) == codes({2, 2}, 3));
  EXPECT_FALSE(codes({1, 2}, 3) == codes({1, 3}, 3));
  EXPECT_FALSE(codes({1, 2}, 3) == codes({1, 2}, 4));
  EXPECT_TRUE(codes({1, 2, 5}, 3) == codes({1, 2}, 3 ^ 5)) << "a module's stream is xor-ed";
}

// ---- Threads ------------------------------------------------------------------------------------
void serial(std::int64_t count, void (*body)(void*, std::int64_t, std::int64_t), void* context) {
  body(context, 0, count);
}
void one_by_one_from_the_end(std::int64_t count, void (*body)(void*, std::int64_t, std::int64_t),
                             void* context) {
  for (std::int64_t i = count; i-- > 0;) body(context, i, i + 1);
}
void seven_threads(std::int64_t count, void (*body)(void*, std::int64_t, std::int64_t),
                   void* context) {
  std::vector<std::thread> threads;
  for (std::int64_t i = 0; i < 7; ++i)
    threads.emplace_back(body, context, count * i / 7, count * (i + 1) / 7);
  for (std::thread& thread : threads) thread.join();
}

TEST(QuantizeProperties, TheSplitOverThreadsDoesNotMatter) {
  const Matrix x({2, 260, 390}, DType::kBFloat16, Kind::kSpecial);
  for (const char* spec : kSpecs)
    for (const bool columnwise : {false, true}) {
      const Request request{.spec = Spec::parse(spec)};
      const Outputs whole = quantized(x.ref(), request, columnwise);
      for (const ParallelFor split : {serial, one_by_one_from_the_end, seven_threads})
        EXPECT_TRUE(quantized(x.ref(), request, columnwise, {.parallel_for = split}) == whole)
            << spec;
    }
}

// ---- By hand ------------------------------------------------------------------------------------
std::vector<std::uint8_t> codes_of(const Matrix& x, const char* spec, Outputs* all = nullptr) {
  const Outputs out = quantized(x.ref(), {.spec = Spec::parse(spec)}, false);
  if (all) *all = out;
  return std::vector<std::uint8_t>(out.codes.data(), out.codes.data() + out.codes.size());
}

TEST(QuantizeByHand, Nvfp4) {
  // amax 6: S = 448, the block scale is 448, and elements are encoded as they are.
  const std::vector<float> values = {0,      0.5f,   1,    1.5f, 2,     3,    4,     6,
                                     -0.25f, -0.75f, 2.5f, -5,   0.26f, 5.5f, -0.0f, 1.2f};
  Outputs out;
  //  nibbles, low first:          0 1   2 3   4 5   6 7   8 a   4 e   1 7   8 2
  const std::vector<std::uint8_t> want = {0x10, 0x32, 0x54, 0x76, 0xA8, 0xE4, 0x71, 0x28};
  EXPECT_EQ(codes_of(Matrix({1, 1, 16}, DType::kFloat32, values), "nvfp4", &out), want);
  EXPECT_EQ(out.scale[0], 0x7E);  // 448
  EXPECT_EQ(out.amax[0], 6.0f);
  EXPECT_EQ(out.decoded[7], oracle::to_bf16(6 * 448));
}

TEST(QuantizeByHand, MxRoundsItsScaleUp) {
  // amax 500 > 448: scale 2 where the OCP rule takes 1 and saturates.
  std::vector<float> values(32, 1.0f);
  values[3] = 500;
  const Matrix x({1, 1, 32}, DType::kBFloat16, values);
  Outputs out;
  EXPECT_EQ(codes_of(x, "mxfp8", &out)[3], 0x78);  // 250 -> 256
  EXPECT_EQ(out.scale[0], 128);
  EXPECT_EQ(out.codes[0], 0x30);  // 1 / 2
  EXPECT_EQ(codes_of(x, "mxfp8+floor", &out)[3], 0x7E);
  EXPECT_EQ(out.scale[0], 127);
  EXPECT_EQ(out.codes[0], 0x38);
}

TEST(QuantizeByHand, Fp8) {
  const Matrix x({1, 2, 2}, DType::kFloat32, {1, -2, 0.5f, 3.5f});
  Outputs out;
  EXPECT_EQ(codes_of(x, "e4m3/tensor", &out), (std::vector<std::uint8_t>{0x70, 0xF8, 0x68, 0x7E}));
  EXPECT_EQ(out.fp32_scale(0), 1.0f / 128);  // 448 / 3.5
  EXPECT_EQ(codes_of(x, "e4m3/row", &out), (std::vector<std::uint8_t>{0x70, 0xF8, 0x68, 0x7E}));
  EXPECT_EQ(out.fp32_scale(0), 1.0f / 128);  // 448 / 2 = 224, down to 128
  EXPECT_EQ(out.fp32_scale(1), 1.0f / 128);
  codes_of(x, "e4m3/row+exact", &out);
  EXPECT_EQ(out.fp32_scale(0), 1.0f / 224);
}

TEST(QuantizeByHand, OneOutlierEmptiesABlockOfNvfp4) {
  // The second block's scale would be 1e-6 / 6 * 448 < 2^-10: zero codes, of negative elements too.
  std::vector<float> values(32, -1e-6f);
  values[0] = 6;
  Outputs out;
  const std::vector<std::uint8_t> codes =
      codes_of(Matrix({1, 1, 32}, DType::kFloat32, values), "nvfp4", &out);
  EXPECT_EQ(out.scale[1], 0);
  for (std::size_t i = 8; i < 16; ++i) EXPECT_EQ(codes[i], 0) << i;
  EXPECT_EQ(out.decoded[20], 0);
}

}  // namespace
}  // namespace minifloat
