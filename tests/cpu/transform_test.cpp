// hadamard against the oracle and against its inverse; the scale layout against a tile-by-tile
// walk; the transpose of packed codes against a move of single nibbles.
#include "minifloat/transform.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "harness.h"

namespace minifloat {
namespace {

// ---- Hadamard -----------------------------------------------------------------------------------
Guarded<std::uint16_t> hadamard_of(const Matrix& x, int points, bool columnwise,
                                   std::uint32_t signs = kHadamardSigns) {
  const Shape read = read_shape(x.shape(), columnwise);
  Guarded<std::uint16_t> out(read.batch * read.rows * ((read.cols + points - 1) / points * points));
  hadamard(x.ref(), points, columnwise, signs, out.data());
  EXPECT_TRUE(out.guards_hold());
  return out;
}

TEST(Hadamard, ValuesAsTheOracle) {
  for (const Shape& shape : {Shape{1, 1, 1}, Shape{1, 33, 129}, Shape{2, 130, 17},
                             Shape{1, 128, 256}, Shape{1, 0, 4}, Shape{1, 4, 0}})
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
      for (const Kind kind : {Kind::kWide, Kind::kSpecial})
        for (const int points : {16, 32, 64, 128})
          for (const bool columnwise : {false, true}) {
            const Matrix x(shape, dtype, kind, 5, 3);
            const Guarded<std::uint16_t> got = hadamard_of(x, points, columnwise);
            std::size_t at = 0;
            for (std::int64_t e = 0; e < shape.batch; ++e) {
              const oracle::Values in = x.as_read(e, columnwise);
              for (std::int64_t r = 0; r < in.rows; ++r)
                for (std::int64_t c = 0; c < in.cols; c += points) {
                  std::vector<float> v(static_cast<std::size_t>(points), 0.0f);
                  for (std::int64_t i = c; i < std::min(in.cols, c + points); ++i)
                    v[static_cast<std::size_t>(i - c)] = in.at(r, i);
                  oracle::transform(v.data(), points, oracle::fixed_signs());
                  for (const float want : v)
                    ASSERT_TRUE(same_float(oracle::from_bf16(got[at++]), want))
                        << points << " points, row " << r << ", column " << c;
                }
            }
            EXPECT_EQ(at, got.size());
          }
}

TEST(Hadamard, KeepsProductsAndUndoesItself) {
  const int points = 64;
  const Matrix x({1, 1, points}, DType::kFloat32, Kind::kModerate, 1),
      y({1, 1, points}, DType::kFloat32, Kind::kModerate, 2);
  const auto hx = hadamard_of(x, points, false), hy = hadamard_of(y, points, false);
  double direct = 0, rotated = 0, norms = 0;
  for (std::int64_t i = 0; i < points; ++i) {
    const auto k = static_cast<std::size_t>(i);
    direct += double{x.at(0, 0, i)} * y.at(0, 0, i);
    rotated += double{oracle::from_bf16(hx[k])} * oracle::from_bf16(hy[k]);
    norms += std::fabs(double{oracle::from_bf16(hx[k])} * oracle::from_bf16(hy[k]));
  }
  EXPECT_NEAR(rotated, direct, norms * 0x1p-7);  // each factor rounded to bf16: 2^-9 of it, twice

  // H s (s H x) with the signs off the second time is H H (s x) = s x, up to bf16's rounding of n
  // points.
  std::vector<float> values;
  for (std::size_t i = 0; i < hx.size(); ++i) values.push_back(oracle::from_bf16(hx[i]));
  const auto back = hadamard_of(Matrix({1, 1, points}, DType::kFloat32, values), points, false, 0);
  for (std::int64_t i = 0; i < points; ++i) {
    const float sign = kHadamardSigns >> (i % 16) & 1 ? -1.0f : 1.0f;
    EXPECT_NEAR(sign * oracle::from_bf16(back[static_cast<std::size_t>(i)]), x.at(0, 0, i),
                3 * 8 * 0x1p-8);
  }
}

// ---- Swizzle ------------------------------------------------------------------------------------
std::vector<std::uint8_t> numbered(std::int64_t count) {
  std::vector<std::uint8_t> v(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<std::uint8_t>(1 + i * 7 % 255);
  return v;
}

// Walks over the tiles of a dense matrix: 32 rows of 16 bytes, where byte 4 q + c of row i is the
// scale of tile row 32 q + i and column c.
void walk(const std::vector<std::uint8_t>& scale, std::int64_t pitch, std::int64_t row,
          std::int64_t col, std::int64_t rows, std::int64_t cols, std::vector<std::uint8_t>& out) {
  for (std::int64_t tile_row = 0; tile_row < rows; tile_row += 128)
    for (std::int64_t tile_col = 0; tile_col < cols; tile_col += 4)
      for (std::int64_t i = 0; i < 32; ++i)
        for (std::int64_t q = 0; q < 4; ++q)
          for (std::int64_t c = 0; c < 4; ++c) {
            const std::int64_t r = tile_row + 32 * q + i, k = tile_col + c;
            out.push_back(r < rows && k < cols
                              ? scale[static_cast<std::size_t>((row + r) * pitch + col + k)]
                              : std::uint8_t{0});
          }
}

void expect_layout(const ScaleMatrix& shape, const std::vector<std::uint8_t>& scale,
                   std::vector<std::uint8_t> want) {
  ASSERT_LE(static_cast<std::int64_t>(want.size()), shape.batch * shape.swizzled_bytes());
  want.resize(
      static_cast<std::size_t>(shape.batch * shape.swizzled_bytes()));  // the bound's rest is zero
  Guarded<std::uint8_t> out(static_cast<std::int64_t>(want.size()));
  swizzle_scales(shape, scale.data(), out.data());
  EXPECT_TRUE(out.guards_hold());
  EXPECT_EQ(std::vector<std::uint8_t>(out.data(), out.data() + out.size()), want);
  Guarded<std::uint8_t> back(static_cast<std::int64_t>(scale.size()));
  unswizzle_scales(shape, out.data(), back.data());
  EXPECT_TRUE(back.guards_hold());
  EXPECT_EQ(std::vector<std::uint8_t>(back.data(), back.data() + back.size()), scale);
}

TEST(Swizzle, DenseAndBatched) {
  for (const auto& [batch, rows, cols] :
       {Shape{1, 1, 1}, Shape{1, 128, 4}, Shape{1, 129, 5}, Shape{3, 200, 9}, Shape{1, 0, 4},
        Shape{2, 4, 0}, Shape{1, 127, 16}}) {
    const std::vector<std::uint8_t> scale = numbered(batch * rows * cols);
    std::vector<std::uint8_t> want;
    for (std::int64_t e = 0; e < batch; ++e) walk(scale, cols, e * rows, 0, rows, cols, want);
    expect_layout({.batch = batch, .rows = rows, .cols = cols}, scale, want);
  }
}

TEST(Swizzle, GroupsAlongRowsAndColumns) {
  for (const std::vector<std::int32_t>& ends :
       {std::vector<std::int32_t>{7}, {3, 3, 140, 141}, {0, 128, 256}, {1, 2, 3, 300}}) {
    const auto groups = static_cast<std::int64_t>(ends.size());
    const std::int64_t length = ends.back(), other = 9;
    const std::vector<std::uint8_t> scale = numbered(length * other);
    std::vector<std::uint8_t> along_m, along_k;
    std::int64_t begin = 0;
    for (const std::int64_t end : ends) {
      walk(scale, other, begin, 0, end - begin, other, along_m);
      walk(scale, length, 0, begin, other, end - begin, along_k);
      begin = end;
    }
    expect_layout({.rows = length,
                   .cols = other,
                   .kind = ScaleGroups::kAlongM,
                   .offsets = ends.data(),
                   .groups = groups},
                  scale, along_m);
    expect_layout({.rows = other,
                   .cols = length,
                   .kind = ScaleGroups::kAlongK,
                   .offsets = ends.data(),
                   .groups = groups},
                  scale, along_k);
  }
}

// ---- Nibbles ------------------------------------------------------------------------------------
TEST(TransposeNibbles, EveryNibbleMovesOnce) {
  for (const auto& [batch, rows, cols] :
       {Shape{1, 1, 1}, Shape{1, 2, 2}, Shape{1, 15, 17}, Shape{2, 33, 64}, Shape{1, 129, 127},
        Shape{3, 64, 1}, Shape{1, 200, 130}, Shape{1, 0, 8}, Shape{1, 8, 0}}) {
    const std::int64_t pitch = (cols + 1) / 2, out_pitch = (rows + 1) / 2;
    std::vector<std::uint8_t> codes = numbered(batch * rows * pitch);
    Guarded<std::uint8_t> out(batch * cols * out_pitch);
    transpose_nibbles({codes.data(), batch, rows, cols}, out.data());
    EXPECT_TRUE(out.guards_hold());
    for (std::int64_t e = 0; e < batch; ++e)
      for (std::int64_t c = 0; c < cols; ++c)
        for (std::int64_t r = 0; r < 2 * out_pitch; ++r) {
          const int got =
              out[static_cast<std::size_t>((e * cols + c) * out_pitch + r / 2)] >> (r % 2 * 4) &
              0xF;
          const int byte =
              r < rows ? codes[static_cast<std::size_t>((e * rows + r) * pitch + c / 2)] : 0;
          ASSERT_EQ(got, byte >> (c % 2 * 4) & 0xF)
              << rows << " x " << cols << " at " << r << ", " << c;
        }
  }
}

TEST(TransposeNibbles, OfCodesIsTheColumnwiseOperandOf2dBlocks) {
  const Matrix x({2, 96, 80}, DType::kBFloat16, Kind::kWide);
  const Spec spec = Spec::parse("nvfp4/16x16");
  const Outputs row = quantized(x.ref(), {.spec = spec}, false),
                col = quantized(x.ref(), {.spec = spec}, true);
  Guarded<std::uint8_t> out(static_cast<std::int64_t>(col.codes.size()));
  transpose_nibbles({row.codes.data(), 2, 96, 80}, out.data());
  EXPECT_TRUE(out == col.codes);
}

}  // namespace
}  // namespace minifloat
