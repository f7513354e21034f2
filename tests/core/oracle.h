// An oracle of the number formats in double, from their definitions. It includes nothing of core/
// and shares no code, no table and no bit trick with it: a code's value is a sum of powers of two,
// and rounding is a search among those values.
//
//     values of a format, ascending:   v[0] = 0 < v[1] < ... < v[max]    v[c]: the value of code c
//     |x| between v[c] and v[c + 1]:   nearest, ties to even c;  up;  or up with probability frac
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace oracle {

struct Format {
  const char* name;
  int exponent_bits, mantissa_bits;
  unsigned max_code;  // of the largest finite magnitude
  unsigned nan_code;  // the code of NaN
  bool saturates;     // past the largest: that, and not max_code + 1, which is infinity
  int bias;           // of the exponent
};
inline constexpr Format kE4M3{"e4m3", 4, 3, 0x7E, 0x7F, true, 7};
inline constexpr Format kE5M2{"e5m2", 5, 2, 0x7B, 0x7F, true, 15};
inline constexpr Format kE2M1{"e2m1", 2, 1, 0x7, 0x7, true, 1};
inline constexpr Format kE1M2{"e1m2", 1, 2, 0x7, 0x7, true, 1};
inline constexpr Format kBf16{"bf16", 8, 7, 0x7F7F, 0x7FC0, false, 127};

// Returns the value of a magnitude code as if no exponent were special.
inline double value(const Format& f, unsigned code) {
  const int exponent = static_cast<int>(code / std::exp2(f.mantissa_bits));
  const double fraction = std::fmod(code, std::exp2(f.mantissa_bits)) / std::exp2(f.mantissa_bits);
  return exponent == 0 ? fraction * std::exp2(1 - f.bias)
                       : (1 + fraction) * std::exp2(exponent - f.bias);
}

inline double max_value(const Format& f) { return value(f, f.max_code); }
inline int max_exponent(const Format& f) { return std::ilogb(max_value(f)); }

// Rounds a real number once to fp32. A sum, product or quotient of two floats is exact in double,
// or far enough from a tie of fp32 (53 >= 2 * 24 + 2 bits) that rounding it twice equals rounding
// it once.
inline float fl32(double x) { return static_cast<float>(x); }

inline float from_bits(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline std::uint32_t to_bits(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof x);
  return bits;
}

// The place of a magnitude: at or above v[code] by the fraction `above` of the gap to v[code + 1].
struct Place {
  unsigned code;
  double above;  // exact in double: a float minus a value, over a power of two
};

class Grid {
 public:
  explicit Grid(const Format& f) : format_(f) {
    for (unsigned c = 0; c <= f.max_code + (f.saturates ? 0u : 1u); ++c)
      values_.push_back(value(f, c));
  }
  const Format& format() const { return format_; }
  double operator[](unsigned code) const { return values_[code]; }
  unsigned top() const { return static_cast<unsigned>(values_.size()) - 1; }

  Place place(double magnitude) const {
    if (magnitude >= values_.back()) return {top(), 0};
    const auto next = std::upper_bound(values_.begin(), values_.end(), magnitude);
    const double below = next[-1];
    return {static_cast<unsigned>(next - values_.begin()) - 1,
            (magnitude - below) / (*next - below)};
  }

  unsigned nearest(float x) const {
    return rounded(x,
                   [](const Place& p) { return p.above > 0.5 || (p.above == 0.5 && p.code % 2); });
  }
  unsigned up(float x) const {
    return rounded(x, [](const Place& p) { return p.above > 0; });
  }
  // Rounds up iff the first 16 binary digits of the fraction, plus `random` of 16 bits, reach 2^16.
  unsigned stochastic(float x, unsigned random) const {
    return rounded(x,
                   [=](const Place& p) { return std::floor(p.above * 65536) + random >= 65536; });
  }

 private:
  template <class GoesUp>
  unsigned rounded(float x, GoesUp goes_up) const {
    if (std::isnan(x)) return format_.nan_code;
    const Place p = place(std::fabs(static_cast<double>(x)));
    const unsigned sign =
        std::signbit(x) ? 1u << (format_.exponent_bits + format_.mantissa_bits) : 0;
    return sign + p.code + (goes_up(p) ? 1 : 0);
  }

  Format format_;
  std::vector<double> values_;
};

// Returns cvt.rp.satfinite.ue8m0x2 of one nonnegative float, by the PTX ISA: the code k + 127 of
// the smallest 2^k at or above x that E8M0 has; saturated where there is none; NaN 255.
inline std::uint32_t ue8m0_rounded_up(float x) {
  if (std::isnan(x)) return 255;
  if (x <= 0x1p-127f) return 0;
  if (x > 0x1p127f) return 254;
  int k;
  const bool is_power =
      std::frexp(double{x}, &k) == 0.5;  // x = fraction * 2^k, fraction in [0.5, 1)
  return static_cast<std::uint32_t>(k - (is_power ? 1 : 0) + 127);
}

// Returns the 16 random bits of the four elements that share a word of cvt.rs, byte by byte: every
// byte of the word serves two elements, one of them with its bits reversed.
inline unsigned reversed_byte(unsigned byte) {
  unsigned out = 0;
  for (int i = 0; i < 8; ++i)
    if (byte >> i & 1) out += 128u >> i;
  return out;
}
inline unsigned cvt_rs_bits(int format_bits, std::uint32_t word, int lane) {
  unsigned b[4], rev[4];
  for (int i = 0; i < 4; ++i) {
    b[i] = static_cast<unsigned>(word / std::exp2(8 * i)) % 256;
    rev[i] = reversed_byte(b[i]);
  }
  const unsigned four[4] = {b[2] * 256 + b[0], rev[0] * 256 + rev[2], b[3] * 256 + b[1],
                            rev[1] * 256 + rev[3]};
  const unsigned eight[4] = {b[1] * 256 + b[0], rev[0] * 256 + rev[1], b[3] * 256 + b[2],
                             rev[2] * 256 + rev[3]};
  return format_bits == 4 ? four[lane] : eight[lane];
}

}  // namespace oracle
