// The shared parts of src/cpu's suites: matrices with unusual values and strides, outputs between
// guards, and the comparison of a direction's outputs with the oracle's.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cpu/operand_oracle.h"
#include "minifloat/quantize.h"

namespace minifloat {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr std::int64_t kSeedAndCount[2] = {0x1234'5678'9ABC, 3};

struct Shape {
  std::int64_t batch, rows, cols;
  std::int64_t elements() const { return batch * rows * cols; }
};

inline std::string name_of(DType dtype) { return dtype == DType::kFloat32 ? "fp32" : "bf16"; }

// ---- Values -------------------------------------------------------------------------------------
enum class Kind {
  kModerate,  // near normal, within a few binades
  kWide,      // over 60 binades, with zeros, negative zeros, tiny blocks and outliers
  kSpecial,   // kWide with some Inf, NaN, denormals and largest floats
};

// A batch of matrices, each row followed by `gap` elements that must not be read as values.
class Matrix {
 public:
  Matrix(Shape shape, DType dtype, Kind kind, std::uint64_t seed = 1, std::int64_t gap = 0)
      : shape_(shape), dtype_(dtype), pitch_(shape.cols + gap) {
    state_ = seed * 0x9E3779B97F4A7C15ull + 1;
    const auto count = static_cast<std::size_t>(shape.batch * shape.rows * pitch_);
    values_.resize(count, kNan);
    for (std::int64_t i = 0; i < shape.batch * shape.rows; ++i)
      for (std::int64_t c = 0; c < shape.cols; ++c)
        values_[static_cast<std::size_t>(i * pitch_ + c)] = rounded(draw(kind, i, c));
    store();
  }
  Matrix(Shape shape, DType dtype, const std::vector<float>& values)
      : shape_(shape), dtype_(dtype), pitch_(shape.cols), values_(values) {
    for (float& v : values_) v = rounded(v);
    store();
  }

  const Shape& shape() const { return shape_; }
  DType dtype() const { return dtype_; }
  float at(std::int64_t e, std::int64_t r, std::int64_t c) const {
    return values_[static_cast<std::size_t>((e * shape_.rows + r) * pitch_ + c)];
  }

  TensorRef ref() const {
    const void* data = dtype_ == DType::kFloat32 ? static_cast<const void*>(values_.data())
                                                 : static_cast<const void*>(bf16_.data());
    return {.data = data,
            .dtype = dtype_,
            .batch = shape_.batch,
            .rows = shape_.rows,
            .cols = shape_.cols,
            .batch_stride = shape_.rows * pitch_,
            .row_stride = pitch_};
  }

  // Returns matrix e as read in a direction.
  oracle::Values as_read(std::int64_t e, bool columnwise) const {
    oracle::Values out;
    out.rows = columnwise ? shape_.cols : shape_.rows;
    out.cols = columnwise ? shape_.rows : shape_.cols;
    for (std::int64_t r = 0; r < out.rows; ++r)
      for (std::int64_t c = 0; c < out.cols; ++c)
        out.v.push_back(columnwise ? at(e, c, r) : at(e, r, c));
    return out;
  }
  Matrix transposed() const {
    std::vector<float> v;
    for (std::int64_t e = 0; e < shape_.batch; ++e) {
      const oracle::Values t = as_read(e, true);
      v.insert(v.end(), t.v.begin(), t.v.end());
    }
    return Matrix({shape_.batch, shape_.cols, shape_.rows}, dtype_, v);
  }

 private:
  std::uint32_t next() {  // the upper half of a 64-bit congruential sequence
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<std::uint32_t>(state_ >> 32);
  }
  float uniform() { return static_cast<float>(next() >> 8) * 0x1p-23f - 1; }  // [-1, 1)

  float draw(Kind kind, std::int64_t row, std::int64_t col) {
    const float x = uniform() + uniform() + uniform();
    if (kind == Kind::kModerate) return x;
    if ((row / 16 + col / 32) % 5 == 3) return 0;                   // whole zero blocks
    if ((row / 16 + col / 32) % 7 == 2) return std::ldexp(x, -40);  // blocks of tiny values
    const std::uint32_t pick = next() % 64;
    if (pick == 0) return -0.0f;
    if (pick < 4) return 0;
    if (pick == 4) return x * 300;
    if (kind == Kind::kSpecial && next() % 256 == 0) {
      const float special[] = {kInfinity,
                               -kInfinity,
                               kNan,
                               -kNan,
                               0x1p-149f,
                               -0x1p-130f,
                               std::numeric_limits<float>::max(),
                               0x1p127f};
      return special[next() % 8];
    }
    return pick < 24 ? std::ldexp(x, static_cast<int>(next() % 60) - 50) : x;
  }

  float rounded(float x) const {  // to the dtype, by cutting bits
    const std::uint32_t mask = dtype_ == DType::kFloat32 ? 0xFFFF'FFFFu : 0xFFFF'0000u;
    return oracle::from_bits(oracle::to_bits(x) & mask);
  }
  void store() {
    if (dtype_ == DType::kBFloat16)
      for (const float v : values_)
        bf16_.push_back(static_cast<std::uint16_t>(oracle::to_bits(v) >> 16));
  }

  Shape shape_;
  DType dtype_;
  std::int64_t pitch_;
  std::uint64_t state_ = 0;
  std::vector<float> values_;
  std::vector<std::uint16_t> bf16_;
};

// ---- Outputs ------------------------------------------------------------------------------------
// Memory between guards, filled with an unlikely pattern.
template <class T>
class Guarded {
 public:
  Guarded() : Guarded(0) {}
  explicit Guarded(std::int64_t count) : count_(static_cast<std::size_t>(count)) {
    bytes_.assign(count_ * sizeof(T) + 2 * kGuard, kFill);
  }
  T* data() { return reinterpret_cast<T*>(bytes_.data() + kGuard); }
  const T* data() const { return reinterpret_cast<const T*>(bytes_.data() + kGuard); }
  std::size_t size() const { return count_; }
  T operator[](std::size_t i) const { return data()[i]; }
  bool operator==(const Guarded&) const = default;  // the guards too
  bool guards_hold() const {
    const auto is_fill = [](std::uint8_t b) { return b == kFill; };
    return std::all_of(bytes_.begin(), bytes_.begin() + kGuard, is_fill) &&
           std::all_of(bytes_.end() - kGuard, bytes_.end(), is_fill);
  }
  bool untouched() const {
    return std::all_of(bytes_.begin(), bytes_.end(), [](std::uint8_t b) { return b == kFill; });
  }

 private:
  static constexpr std::uint8_t kFill = 0xA5;
  static constexpr std::ptrdiff_t kGuard = 64;
  std::size_t count_;
  std::vector<std::uint8_t> bytes_;
};

// The outputs of one direction for an operand read (batch, rows, cols).
struct Outputs {
  Guarded<std::uint8_t> codes, scale;
  Guarded<float> amax;
  Guarded<std::uint16_t> decoded;

  Outputs() = default;
  Outputs(const Spec& spec, Shape read) {
    const std::int64_t padded = spec.padded_cols(read.cols);
    const std::int64_t scales = spec.has_blocks()
                                    ? spec.scale_rows(read.rows) * spec.scale_cols(read.cols)
                                : spec.has_row_amax() ? read.rows
                                                      : 1;
    const bool fp32 = spec.scale_type() == ScaleType::kFloat32;
    codes = Guarded<std::uint8_t>(read.batch * read.rows * spec.code_cols(read.cols));
    scale = Guarded<std::uint8_t>(read.batch * scales * (fp32 ? 4 : 1));
    amax = Guarded<float>(read.batch * (spec.has_row_amax()      ? read.rows
                                        : spec.has_tensor_amax() ? 1
                                                                 : 0));
    if (!spec.has_fp32_values()) decoded = Guarded<std::uint16_t>(read.batch * read.rows * padded);
  }
  bool operator==(const Outputs&) const = default;
  bool guards_hold() const {
    return codes.guards_hold() && scale.guards_hold() && amax.guards_hold() &&
           decoded.guards_hold();
  }
  bool untouched() const {
    return codes.untouched() && scale.untouched() && amax.untouched() && decoded.untouched();
  }
  float fp32_scale(std::size_t i) const {
    float s;
    std::memcpy(&s, scale.data() + 4 * i, sizeof s);
    return s;
  }
};

struct Request {
  Spec spec;
  const float* given_amax = nullptr;
  Origin origin = {};
  std::uint64_t stream = 7;
};

inline Shape read_shape(const Shape& s, bool columnwise) {
  return columnwise ? Shape{s.batch, s.cols, s.rows} : s;
}

inline Operand operand_of(const Request& request, Outputs& out) {
  const Spec& spec = request.spec;
  return {.spec = spec,
          .given_amax = request.given_amax,
          .random = {.state = spec.stochastic ? kSeedAndCount : nullptr,
                     .state_size = spec.stochastic ? 2 : 0,
                     .stream = request.stream},
          .origin = request.origin,
          .codes = out.codes.data(),
          .scale = out.scale.data(),
          .amax = spec.has_tensor_amax() || spec.has_row_amax() ? out.amax.data() : nullptr,
          .history = {},
          .decoded = spec.has_fp32_values() ? nullptr : out.decoded.data()};
}

inline Outputs quantized(const TensorRef& x, const Request& request, bool columnwise,
                         const Execution& execution = {}) {
  Outputs out(request.spec, read_shape({x.batch, x.rows, x.cols}, columnwise));
  const Operand operand = operand_of(request, out);
  quantize(x, columnwise ? nullptr : &operand, columnwise ? &operand : nullptr, execution);
  EXPECT_TRUE(out.guards_hold()) << "written outside of a buffer";
  return out;
}

// ---- Comparison ---------------------------------------------------------------------------------
inline bool same_float(float a, float b) {  // any NaN equals any NaN
  return oracle::to_bits(a) == oracle::to_bits(b) || (std::isnan(a) && std::isnan(b));
}
inline bool same_bf16(std::uint16_t a, std::uint16_t b) {  // and zeros have no sign
  const float x = oracle::from_bf16(a), y = oracle::from_bf16(b);
  return same_float(x, y) || (x == 0 && y == 0);
}

// The comparison of outputs with the oracle, matrix by matrix: the first difference, if any.
class Difference {
 public:
  Difference(const Matrix& x, const Request& request, bool columnwise, const Outputs& got) {
    const Shape read = read_shape(x.shape(), columnwise);
    const std::int64_t amaxes = got.amax.size() > 0 && read.batch > 0
                                    ? static_cast<std::int64_t>(got.amax.size()) / read.batch
                                    : 0;
    for (std::int64_t e = 0; e < read.batch && text_.empty(); ++e) {
      const oracle::Settings settings = {
          .given_amax = request.given_amax ? request.given_amax + e * amaxes : nullptr,
          .key = oracle::mixed_seed(static_cast<std::uint64_t>(kSeedAndCount[0]),
                                    static_cast<std::uint64_t>(kSeedAndCount[1])),
          .stream = request.stream,
          .first_row = request.origin.row + e * read.rows,
          .first_col = request.origin.col,
          .rows_are_columns = columnwise};
      compare(request.spec, e, oracle::Quantizer(request.spec, settings)(x.as_read(e, columnwise)),
              got);
    }
  }
  const std::string& text() const { return text_; }

 private:
  template <class Want, class Got>
  void expect(bool same, const char* what, std::int64_t e, std::size_t i, Want want, Got got) {
    if (same || !text_.empty()) return;
    text_ = std::string(what) + " of matrix " + std::to_string(e) + ", entry " + std::to_string(i) +
            ": expected " + std::to_string(want) + ", got " + std::to_string(got);
  }

  void compare(const Spec& spec, std::int64_t e, const oracle::Operand& want, const Outputs& got) {
    const auto per = [&](std::size_t count) { return static_cast<std::size_t>(e) * count; };
    for (std::size_t i = 0; i < want.amax.size(); ++i) {
      const float amax = got.amax[per(want.amax.size()) + i];
      expect(same_float(amax, want.amax[i]), "amax", e, i, want.amax[i], amax);
    }
    for (std::size_t i = 0; i < want.scale.size(); ++i) {
      const std::size_t at = per(want.scale.size()) + i;
      if (spec.scale_type() == ScaleType::kFloat32)
        expect(same_float(got.fp32_scale(at), static_cast<float>(want.scale[i])), "scale", e, i,
               want.scale[i], got.fp32_scale(at));
      else
        expect(got.scale[at] == want.scale[i], "scale code", e, i, want.scale[i], got.scale[at]);
    }
    const auto cols = static_cast<std::size_t>(want.cols);
    const bool nibbles = spec.code_bits() == 4;
    const std::size_t pitch = nibbles ? (cols + 1) / 2 : cols;
    for (std::size_t i = 0; i < want.codes.size(); ++i) {
      const std::size_t row = per(static_cast<std::size_t>(want.rows)) + i / cols, c = i % cols;
      const unsigned byte = got.codes[row * pitch + (nibbles ? c / 2 : c)];
      const unsigned code = !nibbles ? byte : c % 2 ? byte >> 4 : byte & 0xF;
      expect(code == want.codes[i], "code", e, i, want.codes[i], code);
      if (nibbles && c + 1 == cols && c % 2 == 0)
        expect(byte < 16, "the odd row's last nibble", e, i, 0, byte >> 4);
      if (spec.has_fp32_values()) continue;
      const std::uint16_t value = got.decoded[row * cols + c];
      expect(same_bf16(value, want.decoded[i]), "decoded bits", e, i, want.decoded[i], value);
    }
  }

  std::string text_;
};

}  // namespace minifloat
