// The number formats, as compile-time tables. Nothing else in the library spells 448, 57344, 6
// or 1.75.
//
//     bits      s eeee mmm            value = (-1)^s * 2^(e - kBias) * 1.m       for e > 0
//     (E4M3)                                = (-1)^s * 2^(1 - kBias) * 0.m       for e = 0
#pragma once

#include <cstdint>

namespace minifloat {

template <int ExponentBits, int MantissaBits, int Bias = (1 << (ExponentBits - 1)) - 1>
struct Binary {
  static constexpr int kExponentBits = ExponentBits;
  static constexpr int kMantissaBits = MantissaBits;
  static constexpr int kBits = 1 + ExponentBits + MantissaBits;
  static constexpr int kBias = Bias;
  static constexpr int kMinExponent = 1 - kBias;
  static constexpr std::uint32_t kSignBit = 1u << (ExponentBits + MantissaBits);
  static_assert(kBits == 4 || kBits == 8 || kBits == 16,
                "codes of 4 and 8 bits are told apart wherever kBits and code_bits() are compared: "
                "another width needs its own case in each of these places");
};

struct E4M3 : Binary<4, 3> {  // OCP FP8 "fn": no infinity, NaN = s.1111.111
  static constexpr float kMax = 448.0f;
  static constexpr float kMaxPowerOfTwo = 256.0f;
  static constexpr std::uint32_t kMaxBits = 0x7E, kNanBits = 0x7F;
};
struct E5M2 : Binary<5, 2> {  // OCP FP8, IEEE-like; infinity is read, never written
  static constexpr float kMax = 57344.0f;
  static constexpr float kMaxPowerOfTwo = 32768.0f;
  static constexpr std::uint32_t kMaxBits = 0x7B, kInfBits = 0x7C, kNanBits = 0x7F;
};
struct E2M1 : Binary<2, 1> {  // OCP FP4: no infinity, no NaN; NaN encodes as +6
  static constexpr float kMax = 6.0f;
  static constexpr float kMaxPowerOfTwo = 4.0f;
  static constexpr std::uint32_t kMaxBits = 0x7, kNanBits = 0x7;
};
struct E1M2
    : Binary<1, 2, 1> {  // a uniform grid, code / 4: no infinity, no NaN; NaN encodes as +1.75
  static constexpr float kMax = 1.75f;
  static constexpr float kMaxPowerOfTwo = 1.0f;
  static constexpr std::uint32_t kMaxBits = 0x7, kNanBits = 0x7;
};
struct BF16 : Binary<8, 7> {  // the upper half of a float, infinities and NaN included
  static constexpr float kMax = 0x1.FEp127f;
  static constexpr float kMaxPowerOfTwo = 0x1p127f;
  static constexpr std::uint32_t kMaxBits = 0x7F7F, kInfBits = 0x7F80, kNanBits = 0x7FC0;
};
struct E8M0 {  // a power of two and nothing else: value = 2^(bits - kBias), no sign, no zero
  static constexpr int kBits = 8;
  static constexpr int kBias = 127;
  static constexpr std::uint32_t kMaxBits = 0xFE, kNanBits = 0xFF;
};

// The table of float, in which every computation is done.
struct Float32 {
  static constexpr int kMantissaBits = 23;
  static constexpr int kBias = 127;
  static constexpr float kMax = 0x1.FFFFFEp127f;
  static constexpr std::uint32_t kMagnitude = 0x7FFF'FFFFu;
  static constexpr std::uint32_t kExponent = 0x7F80'0000u;  // also the bits of infinity
  static constexpr std::uint32_t kMantissa = 0x007F'FFFFu;
  static constexpr std::uint32_t kImplicitBit = 0x0080'0000u;
  static constexpr std::uint32_t kNanBits = 0x7FC0'0000u;
};

}  // namespace minifloat
