// The comparison of the fast encoding with the definition, for the sample and the exhaustive test.
#pragma once

#include <cstdint>

#include "cpu/encode_fast.h"
#include "minifloat/core/philox.h"
#include "minifloat/core/rounding.h"

namespace minifloat {

// Compares `bits` as a float, with 16 random bits that differ from float to float.
template <class F>
bool encodes_alike(std::uint32_t bits) {
  const float x = bit_cast<float>(bits);
  const std::uint32_t random = static_cast<std::uint32_t>(mix_seed(bits, 1)) & 0xFFFF'0000u;
  const float magnitude = bit_cast<float>(bits & Float32::kMagnitude);
  return cpu::encode_nearest<F>(x) == encode<F>(x) &&
         (x != x || cpu::round_magnitude<F>(magnitude) == decode<F>(encode<F>(magnitude))) &&
         (x != x || cpu::encode_nearest_number<F>(x) == encode<F>(x)) &&
         cpu::encode_stochastic<F>(x, random) == encode<F, Stochastic>(x, {random});
}

}  // namespace minifloat
