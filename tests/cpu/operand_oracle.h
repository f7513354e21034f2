// An oracle of whole operands, written from docs/numerics.md one element at a time: transform,
// amax, scale, code, value. It shares only the names in Spec with core/ and src/cpu. Formats,
// rounding and random bits are tests/core/oracle.h's, which searches tables of values in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/oracle.h"
#include "minifloat/spec.h"

namespace oracle {

inline constexpr double kFloatMax = std::numeric_limits<float>::max();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// ---- Parts --------------------------------------------------------------------------------------
inline const Grid& grid(minifloat::Elements elements) {
  static const Grid e4m3(kE4M3), e5m2(kE5M2), e2m1(kE2M1), e1m2(kE1M2), bf16(kBf16);
  switch (elements) {
    case minifloat::Elements::kE4m3: return e4m3;
    case minifloat::Elements::kE5m2: return e5m2;
    case minifloat::Elements::kE2m1: return e2m1;
    case minifloat::Elements::kE1m2: return e1m2;
    case minifloat::Elements::kBf16: break;
  }
  return bf16;
}

inline std::uint16_t to_bf16(float x) {
  return static_cast<std::uint16_t>(grid(minifloat::Elements::kBf16).nearest(x));
}
inline float from_bf16(std::uint16_t code) { return from_bits(static_cast<unsigned>(code) << 16); }

// Returns the larger magnitude; a NaN is larger than any number.
inline float larger(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return kNan;
  return std::max(std::fabs(a), std::fabs(b));
}

// Philox4x32-7, written from the paper's text.
struct PhiloxBlock {
  std::uint32_t word[4];
};
inline PhiloxBlock philox(std::uint32_t column_group, std::uint32_t row, std::uint64_t stream,
                          std::uint64_t key) {
  std::uint64_t c[4] = {column_group, row, stream % (1ull << 32), stream >> 32};
  std::uint64_t k[2] = {key % (1ull << 32), key >> 32};
  for (int round = 0; round < 7; ++round) {
    const std::uint64_t p = 0xD2511F53ull * c[0], q = 0xCD9E8D57ull * c[2];
    const std::uint64_t next[4] = {(q >> 32) ^ c[1] ^ k[0], q % (1ull << 32),
                                   (p >> 32) ^ c[3] ^ k[1], p % (1ull << 32)};
    std::copy(next, next + 4, c);
    k[0] = (k[0] + 0x9E3779B9ull) % (1ull << 32);
    k[1] = (k[1] + 0xBB67AE85ull) % (1ull << 32);
  }
  PhiloxBlock out;
  for (int i = 0; i < 4; ++i) out.word[i] = static_cast<std::uint32_t>(c[i]);
  return out;
}

inline std::uint64_t mixed_seed(std::uint64_t seed, std::uint64_t count) {
  std::uint64_t z = seed + (count + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return z ^ z >> 31;
}

// The signs of a transform, one a point, repeated.
using Signs = std::vector<int>;
inline Signs fixed_signs() { return {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1}; }
inline Signs eden_signs(std::uint64_t key, std::uint64_t stream) {
  const PhiloxBlock drawn = philox(0xFFFFFFFFu, 0xFFFFFFFFu, stream / 2 * 2, key);
  Signs signs;
  for (int i = 0; i < 128; ++i) signs.push_back(drawn.word[i / 32] >> (i % 32) & 1 ? -1 : 1);
  return signs;
}

// Computes the randomised Hadamard transform of `points` values, to bf16.
inline void transform(float* v, int points, const Signs& signs) {
  std::vector<float> in(v, v + points), out(static_cast<std::size_t>(points));
  const auto at = [](std::vector<float>& values, int i) -> float& {
    return values[static_cast<std::size_t>(i)];
  };
  for (int i = 0; i < points; ++i)
    at(in, i) *= static_cast<float>(signs[static_cast<std::size_t>(i) % signs.size()]);
  for (int stride = 1; stride < points; stride *= 2) {
    for (int i = 0; i < points; ++i)
      at(out, i) = i / stride % 2 ? at(in, i - stride) - at(in, i) : at(in, i) + at(in, i + stride);
    in = out;
  }
  const float norm = fl32(1 / std::sqrt(static_cast<double>(points)));
  for (int i = 0; i < points; ++i) v[i] = from_bf16(to_bf16(fl32(at(in, i) * double{norm})));
}

// ---- Scales -------------------------------------------------------------------------------------
struct ScaleFactors {
  float encode, scale;
};

inline ScaleFactors fp8_factors(const Format& f, float amax, bool power_of_two) {
  if (!std::isfinite(amax)) return {kNan, kNan};
  if (amax == 0) return {1, 1};
  float e = fl32(std::min(max_value(f) / amax, kFloatMax));
  if (power_of_two) e = std::ldexp(1.0f, std::ilogb(e));
  return {e, fl32(1 / double{e})};
}

// Returns the E8M0 code: the smallest power of two under which amax fits, or the OCP rule's.
inline unsigned mx_code(const Format& f, float amax, bool floor) {
  if (!std::isfinite(amax)) return 255;
  if (amax == 0) return 0;
  if (floor) return static_cast<unsigned>(std::max(std::ilogb(amax) - max_exponent(f) + 127, 0));
  unsigned code = 0;
  while (code < 254 && amax / std::ldexp(1.0, static_cast<int>(code) - 127) > max_value(f)) ++code;
  return code;
}
inline double mx_value(unsigned code) {
  return code == 255 ? double{kNan} : std::ldexp(1.0, static_cast<int>(code) - 127);
}

inline const double kEdenLargest = fl32(6 / (17.0 / 16 * 0.93));
struct Nvfp4 {
  float encode;  // S
  float scale;   // fl32(1 / S)
};
inline Nvfp4 nvfp4_tensor(const Format& f, float amax, minifloat::ScaleRounding rounding) {
  if (!std::isfinite(amax)) return {kNan, kNan};
  const bool is_below = rounding == minifloat::ScaleRounding::kPowerOfTwo ||
                        rounding == minifloat::ScaleRounding::kFourOverSix;
  double top = max_value(f) * (is_below ? 256 : 448);
  if (rounding == minifloat::ScaleRounding::kEden) top = 256 * kEdenLargest;
  const float s = amax == 0 ? 1 : fl32(std::min(top / amax, kFloatMax));
  return {s, fl32(1 / double{s})};
}

inline unsigned nvfp4_code(const Format& f, float amax, const Nvfp4& tensor,
                           minifloat::ScaleRounding rounding) {
  const Grid& e4m3 = grid(minifloat::Elements::kE4m3);
  if (!std::isfinite(amax) || std::isnan(tensor.encode)) return kE4M3.nan_code;
  const bool is_eden = rounding == minifloat::ScaleRounding::kEden;
  const float per_amax =
      fl32(double{tensor.encode} * fl32(1 / (is_eden ? kEdenLargest : max_value(f))));
  const double product = double{amax} * per_amax;
  const float v = product > kFloatMax ? static_cast<float>(kFloatMax) : fl32(product);
  if (rounding == minifloat::ScaleRounding::kDefault || is_eden) return e4m3.nearest(v);
  if (rounding == minifloat::ScaleRounding::kUp) return e4m3.up(v);
  if (v == 0) return 0;
  double power = std::ldexp(1.0, -9);
  while (power < std::min(double{v}, 256.0)) power *= 2;
  return e4m3.nearest(static_cast<float>(power));
}

// Returns the code of a block's scale of 6, or of 4, under Four Over Six.
inline unsigned four_over_six_code(float amax, const Nvfp4& tensor, bool is_four) {
  if (!std::isfinite(amax) || std::isnan(tensor.encode)) return kE4M3.nan_code;
  const float sixth = fl32(amax / 6.0);
  const float base = fl32(std::min(double{sixth} * tensor.encode, kFloatMax));
  return grid(minifloat::Elements::kE4m3).nearest(is_four ? fl32(std::min(base * 1.5, 1e9)) : base);
}
inline float nvfp4_factor(unsigned code, const Nvfp4& tensor) {
  const double s = code == kE4M3.nan_code ? double{kNan} : value(kE4M3, code);
  const float undo = fl32(s * tensor.scale);
  return std::isnan(undo) ? kNan : fl32(std::min(1 / double{undo}, kFloatMax));
}

// ---- Operands -----------------------------------------------------------------------------------
// A matrix as read, in row-major order.
struct Values {
  std::int64_t rows = 0, cols = 0;
  std::vector<float> v;
  float& at(std::int64_t r, std::int64_t c) { return v[static_cast<std::size_t>(r * cols + c)]; }
  float at(std::int64_t r, std::int64_t c) const {
    return v[static_cast<std::size_t>(r * cols + c)];
  }
};

struct Settings {
  const float* given_amax = nullptr;
  std::uint64_t key = 0, stream = 0;
  std::int64_t first_row = 0, first_col = 0;  // of random positions
  bool rows_are_columns = false;              // the operand is x's transpose
};

struct Element {
  unsigned code;
  double scale;  // the factor of the code
};

struct Operand {
  std::int64_t rows = 0, cols = 0;  // cols: padded to the transform
  std::vector<float> amax;          // one a tensor or a row; empty for block rules
  std::vector<double> scale;        // in row-major order: value of fp32 scales, code of the others
  std::vector<unsigned> codes;      // one an element
  std::vector<float> values;        // dequantized
  std::vector<std::uint16_t> decoded;  // for an exact product
};

// Returns the bf16 that an exact product reads: zero below 2^-126, saturated above, NaN kept.
inline std::uint16_t product_value(double v) {
  if (std::isnan(v)) return 0x7FC0;
  const double top = from_bf16(0x7F7F);
  const double magnitude = std::fabs(v) < std::ldexp(1.0, -126) ? 0 : std::min(std::fabs(v), top);
  return to_bf16(static_cast<float>(std::copysign(magnitude, v)));
}

class Quantizer {
 public:
  Quantizer(const minifloat::Spec& spec, const Settings& settings)
      : spec_(spec), settings_(settings), grid_(grid(spec.elements)) {}

  Operand operator()(const Values& x) {
    x_ = transformed(x);
    out_.rows = x_.rows;
    out_.cols = x_.cols;
    compute_amax();
    const bool blocks = spec_.block_rows > 0;
    height_ = blocks ? spec_.block_rows : spec_.has_row_amax() ? 1 : x_.rows;
    width_ = blocks ? spec_.block_cols : x_.cols;
    out_.codes.resize(x_.v.size());
    out_.values.resize(x_.v.size());
    out_.decoded.resize(x_.v.size());
    if (!blocks && x_.v.empty())  // amax and scale are outputs all the same
      for (std::int64_t r = 0; r < static_cast<std::int64_t>(out_.amax.size()); ++r)
        out_.scale.push_back(factors(deciding_amax(r, 0)).scale);
    for (std::int64_t r = 0; r < x_.rows && x_.cols > 0; r += height_)
      for (std::int64_t c = 0; c < x_.cols; c += width_) block(r, c);
    if (settings_.given_amax && !spec_.delayed)
      for (std::size_t i = 0; i < out_.amax.size(); ++i) out_.amax[i] = settings_.given_amax[i];
    return out_;
  }

 private:
  Values transformed(const Values& x) const {
    const int n = spec_.transform;
    if (n == 0) return x;
    Values padded{x.rows, (x.cols + n - 1) / n * n, {}};
    padded.v.resize(static_cast<std::size_t>(padded.rows * padded.cols));
    const Signs signs =
        spec_.is_eden() ? eden_signs(settings_.key, settings_.stream) : fixed_signs();
    for (std::int64_t r = 0; r < x.rows; ++r) {
      for (std::int64_t c = 0; c < x.cols; ++c) padded.at(r, c) = x.at(r, c);
      for (std::int64_t c = 0; c < padded.cols; c += n) transform(&padded.at(r, c), n, signs);
    }
    return padded;
  }

  float block_amax(std::int64_t r, std::int64_t c, std::int64_t height, std::int64_t width) const {
    float m = 0;
    for (std::int64_t i = r; i < std::min(r + height, x_.rows); ++i)
      for (std::int64_t j = c; j < std::min(c + width, x_.cols); ++j) m = larger(m, x_.at(i, j));
    return m;
  }

  void compute_amax() {
    if (spec_.has_tensor_amax()) out_.amax = {block_amax(0, 0, x_.rows, x_.cols)};
    if (spec_.has_row_amax())
      for (std::int64_t r = 0; r < x_.rows; ++r) out_.amax.push_back(block_amax(r, 0, 1, x_.cols));
  }
  float active_amax(float current, std::int64_t i) const {
    return settings_.given_amax ? settings_.given_amax[i] : current;
  }
  // Returns the amax that decides the scale of a block at row r: of its row, its tensor, or the
  // block.
  float deciding_amax(std::int64_t r, float block) const {
    if (out_.amax.empty()) return block;
    const std::int64_t i = spec_.has_row_amax() ? r : 0;
    return active_amax(out_.amax[at(i)], i);
  }
  ScaleFactors factors(float amax) const {
    const bool exact = spec_.rule == minifloat::ScaleRule::kTensor ||
                       spec_.scale_rounding == minifloat::ScaleRounding::kExact;
    return fp8_factors(grid_.format(), amax, !exact);
  }

  void block(std::int64_t r, std::int64_t c) {
    using minifloat::ScaleRule;
    const float amax = block_amax(r, c, height_, width_);
    float encode = 1, tensor_scale = 1;
    double scale = 1;
    bool zero = false;
    if (spec_.rule == ScaleRule::kMx) {
      const unsigned code =
          mx_code(grid_.format(), amax, spec_.scale_rounding == minifloat::ScaleRounding::kFloor);
      scale = mx_value(code);
      encode = static_cast<float>(1 / scale);
      out_.scale.push_back(code);
    } else if (spec_.rule == ScaleRule::kNvfp4 || spec_.rule == ScaleRule::kNvfp4Row) {
      const Nvfp4 tensor =
          nvfp4_tensor(grid_.format(), deciding_amax(r, amax), spec_.scale_rounding);
      unsigned code = spec_.scale_rounding == minifloat::ScaleRounding::kFourOverSix
                          ? nearer_of_two(r, c, amax, tensor)
                          : nvfp4_code(grid_.format(), amax, tensor, spec_.scale_rounding);
      encode = nvfp4_factor(code, tensor);
      if (spec_.is_eden()) code = corrected(r, c, code, tensor);
      const double s = code == kE4M3.nan_code ? double{kNan} : value(kE4M3, code);
      zero = code == 0;
      scale = s;
      tensor_scale = tensor.scale;
      out_.scale.push_back(code);
    } else {
      const ScaleFactors f = factors(deciding_amax(r, amax));
      encode = f.encode;
      scale = double{f.scale};
      out_.scale.push_back(scale);
    }
    for (std::int64_t i = r; i < std::min(r + height_, x_.rows); ++i)
      for (std::int64_t j = c; j < std::min(c + width_, x_.cols); ++j)
        element(i, j, zero ? 0 : code_of(i, j, encode), scale, tensor_scale);
  }
  // Returns the code that MS-EDEN stores for a block whose scale has code `code`.
  unsigned corrected(std::int64_t r, std::int64_t c, unsigned code, const Nvfp4& tensor) const {
    const Grid& e4m3 = grid(minifloat::Elements::kE4m3);
    if (code == kE4M3.nan_code) return code;
    const std::int64_t row = settings_.first_row + r, col = settings_.first_col + c;
    const PhiloxBlock drawn =
        philox(static_cast<std::uint32_t>(col / 128), static_cast<std::uint32_t>(row),
               settings_.stream, settings_.key);
    const std::int64_t half = col % 128 / 16;
    const unsigned random = drawn.word[half / 2] >> (half % 2 * 16) & 0xFFFFu;
    const float scale = static_cast<float>(value(kE4M3, code));
    return e4m3.stochastic(fl32(double{scale} * correction(r, c / 128 * 128, tensor)), random);
  }
  float correction(std::int64_t r, std::int64_t first, const Nvfp4& tensor) const {
    float squares[8], products[8];
    for (std::int64_t b = 0; b < 8; ++b) {
      const std::int64_t c = first + 16 * b;
      const unsigned code = nvfp4_code(grid_.format(), block_amax(r, c, 1, 16), tensor,
                                       minifloat::ScaleRounding::kEden);
      const float encode = nvfp4_factor(code, tensor), in_64ths = fl32(encode / 64.0);
      const double s = code == kE4M3.nan_code ? double{kNan} : value(kE4M3, code);
      float square = 0, product = 0;
      for (std::int64_t j = c; j < c + 16; ++j) {
        const float y = std::fabs(x_.at(r, j)), t = y * in_64ths, scaled = y * encode;
        const double q = value(grid_.format(), grid_.nearest(scaled)) / 64;
        square = std::fma(t, t, square);
        product = std::fma(t, static_cast<float>(q), product);
      }
      squares[b] = s == 0 ? 0 : static_cast<float>(s * s) * square;
      products[b] = s == 0 ? 0 : static_cast<float>(s * s) * product;
    }
    for (int half = 4; half > 0; half /= 2)
      for (int b = 0; b < half; ++b) {
        squares[b] = squares[b] + squares[b + half];
        products[b] = products[b] + products[b + half];
      }
    const float c = squares[0] / products[0];
    return std::isfinite(c) ? c : 1.0f;
  }

  // Returns, of the scales of 6 and of 4, the one with the smaller sum of squared errors in the
  // block.
  unsigned nearer_of_two(std::int64_t r, std::int64_t c, float amax, const Nvfp4& tensor) const {
    unsigned codes[2];
    float errors[2];
    for (const int four : {0, 1}) {
      codes[four] = four_over_six_code(amax, tensor, four == 1);
      errors[four] = block_error(r, c, codes[four], nvfp4_factor(codes[four], tensor));
    }
    return errors[1] < errors[0] ? codes[1] : codes[0];
  }
  float block_error(std::int64_t r, std::int64_t c, unsigned code, float encode) const {
    const double s = code == kE4M3.nan_code ? double{kNan} : value(kE4M3, code);
    const float amax = active_amax(out_.amax[0], 0);
    const bool flips = settings_.rows_are_columns && height_ > 1 && spec_.transform == 0;
    std::vector<float> lines(static_cast<std::size_t>(height_), 0.0f);
    for (std::int64_t i = r; i < std::min(r + height_, x_.rows); ++i)
      for (std::int64_t j = c; j < std::min(c + width_, x_.cols); ++j) {
        const float x = x_.at(i, j);
        const float scaled = std::isnan(x) || std::isnan(encode) ? kNan : x * encode;
        const unsigned element = grid_.nearest(scaled);
        const double magnitude = value(grid_.format(), element % 8);
        const float of_code = fl32((element >= 8 ? -magnitude : magnitude) * s);
        const volatile float product = of_code * amax;
        const volatile float back = product / 1536.0f;
        const volatile float d = back - x;
        const volatile float square = d * d;
        float& line = lines[at(flips ? j - c : i - r)];
        line = line + square;
      }
    for (std::size_t half = lines.size() / 2; half > 0; half /= 2)
      for (std::size_t i = 0; i < half; ++i) lines[i] = lines[i] + lines[i + half];
    return lines[0];
  }
  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

  unsigned code_of(std::int64_t r, std::int64_t c, float encode) const {
    float x = x_.at(r, c);
    if (spec_.delayed && std::isinf(x)) x = kNan;
    const float scaled = std::isnan(x) || std::isnan(encode) ? kNan : x * encode;
    if (!spec_.stochastic || spec_.is_eden()) return grid_.nearest(scaled);
    const std::int64_t row = settings_.first_row + r, col = settings_.first_col + c;
    const PhiloxBlock block =
        philox(static_cast<std::uint32_t>(col / 16), static_cast<std::uint32_t>(row),
               settings_.stream, settings_.key);
    const int format_bits = 1 + grid_.format().exponent_bits + grid_.format().mantissa_bits;
    return grid_.stochastic(
        scaled, cvt_rs_bits(format_bits, block.word[col % 16 / 4], static_cast<int>(col % 4)));
  }

  void element(std::int64_t r, std::int64_t c, unsigned code, double scale, float tensor_scale) {
    const Format& f = grid_.format();
    const unsigned sign_bit = 1u << (f.exponent_bits + f.mantissa_bits);
    const unsigned magnitude = code % sign_bit;
    double v = magnitude > f.max_code ? double{kNan} : value(f, magnitude);
    if (code >= sign_bit) v = -v;
    const bool has_pending_factor = spec_.rule == minifloat::ScaleRule::kTensor ||
                                    (spec_.rule == minifloat::ScaleRule::kRow &&
                                     spec_.scale_rounding == minifloat::ScaleRounding::kExact);
    const std::size_t i = at(r * x_.cols + c);
    out_.codes[i] = code;
    out_.values[i] = fl32(double{fl32(v * scale)} * tensor_scale);
    out_.decoded[i] = product_value(has_pending_factor ? v : v * scale);
  }

  const minifloat::Spec& spec_;
  Settings settings_;
  const Grid& grid_;
  Values x_;
  Operand out_;
  std::int64_t height_ = 1, width_ = 1;
};

}  // namespace oracle
