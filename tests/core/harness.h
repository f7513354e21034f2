// The shared parts of core/'s suites: the pairing of a format with its oracle, well-spread sample
// floats, and a tally for spaces too large for one EXPECT an element.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>

#include "minifloat/core/format.h"
#include "oracle.h"

namespace minifloat {

template <class F>
struct OracleOf;
template <>
struct OracleOf<E4M3> {
  static constexpr oracle::Format kFormat = oracle::kE4M3;
};
template <>
struct OracleOf<E5M2> {
  static constexpr oracle::Format kFormat = oracle::kE5M2;
};
template <>
struct OracleOf<E2M1> {
  static constexpr oracle::Format kFormat = oracle::kE2M1;
};
template <>
struct OracleOf<E1M2> {
  static constexpr oracle::Format kFormat = oracle::kE1M2;
};

template <class F>
const oracle::Grid& grid() {
  static const oracle::Grid g(OracleOf<F>::kFormat);
  return g;
}

using ElementFormats = ::testing::Types<E4M3, E5M2, E2M1, E1M2>;
using FourBitFormats = ::testing::Types<E2M1, E1M2>;
struct FormatName {
  template <class F>
  static std::string GetName(int) {
    return OracleOf<F>::kFormat.name;
  }
};

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kSmallestDenormal = std::numeric_limits<float>::denorm_min();
inline constexpr float kFloatMax = std::numeric_limits<float>::max();

// Returns the i-th 32-bit word of a sequence that visits each word once and spreads evenly from the
// start (multiples of 2^32 / golden ratio).
inline std::uint32_t spread(std::uint32_t i) { return i * 0x9E37'79B1u; }

// Returns the i-th sample of floats of magnitude [low, high), either sign, even over bit patterns.
inline float spread_between(float low, float high, std::uint32_t i) {
  const std::uint32_t first = oracle::to_bits(low), count = oracle::to_bits(high) - first;
  const auto offset = static_cast<std::uint32_t>(std::uint64_t{spread(i)} * count >> 32);
  return oracle::from_bits((first + offset) | i << 31);
}

// A count of disagreements, with a description of the first.
class Tally {
 public:
  template <class Describe>
  void check(bool agrees, Describe describe) {
    ++checked_;
    if (agrees) return;
    if (wrong_++ == 0) first_ = describe();
  }
  // Compares a code of x with the oracle's.
  void check_code(float x, std::uint32_t got, std::uint32_t want) {
    check(got == want, [&] { return describe_code(x, got, want); });
  }
  void check_bits(float x, float got, float want) {
    check(oracle::to_bits(got) == oracle::to_bits(want), [&] {
      char text[200];
      std::snprintf(text, sizeof text, "%a (0x%08X) -> %a (0x%08X), expected %a (0x%08X)", x,
                    oracle::to_bits(x), got, oracle::to_bits(got), want, oracle::to_bits(want));
      return std::string(text);
    });
  }
  void merge(const Tally& other) {
    if (wrong_ == 0) first_ = other.first_;
    wrong_ += other.wrong_;
    checked_ += other.checked_;
  }
  long checked() const { return checked_; }
  ::testing::AssertionResult none_wrong() const {
    if (wrong_ == 0 && checked_ > 0) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure()
           << wrong_ << " of " << checked_ << " wrong, the first: " << first_;
  }

 private:
  static std::string describe_code(float x, std::uint32_t got, std::uint32_t want) {
    char text[200];
    std::snprintf(text, sizeof text, "%a (0x%08X) -> code 0x%02X, expected 0x%02X", x,
                  oracle::to_bits(x), got, want);
    return text;
  }

  long checked_ = 0;
  long wrong_ = 0;
  std::string first_;
};

}  // namespace minifloat
