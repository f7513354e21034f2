// 4-bit codes -> E4M3 codes of the same values (core/fp4_as_fp8.h), through a table of a block's
// eight magnitudes.
#pragma once

#include <cstdint>

#include "cuda/common/ptx.cuh"
#include "minifloat/core/fp4_as_fp8.h"

namespace minifloat::cuda {

// The E4M3 codes of a 4-bit format's eight magnitudes in a block, four a word.
struct Fp8CodeTable {
  std::uint32_t low, high;
  std::uint32_t signs;  // the bits that a code's sign may set: none for NaN
};
// Returns the table of a block.   one: the value of the format's 1 as FP8, 2^(k - K + T), or 0
template <class F>
__device__ __forceinline__ Fp8CodeTable fp8_code_table(float one) {
  const auto both = [&](std::uint32_t code) {
    return cvt_e4m3x2(decode<F>(code) * one, decode<F>(code + 1) * one);
  };
  return {cvt_e4m3x2(0.0f, decode<F>(1) * one) | both(2) << 16, both(4) | both(6) << 16,
          0x8080'8080u};
}
// Returns the table of a block whose scale is NaN.
__device__ __forceinline__ Fp8CodeTable fp8_nan_table() {
  return {E4M3::kNanBits * 0x0101'0101u, E4M3::kNanBits * 0x0101'0101u, 0};
}

// Returns the FP8 codes of four codes in the low nibbles of w.
__device__ __forceinline__ std::uint32_t four_fp8_codes(const Fp8CodeTable& table,
                                                        std::uint32_t w) {
  const std::uint32_t magnitude = __byte_perm(table.low, table.high, w & 0x7777u);
  // The byte is 0x80 for a selector of 0; a selector of 8 fills it with that byte's sign.
  const std::uint32_t sign = permute_bytes(0x80u, 0u, w & 0x8888u);
  return magnitude | ((sign << 1) & table.signs);
}
// Returns the FP8 codes of 16 codes, 8 a word.
__device__ __forceinline__ uint4 fp8_codes(const Fp8CodeTable& table, std::uint32_t first,
                                           std::uint32_t second) {
  return make_uint4(four_fp8_codes(table, first), four_fp8_codes(table, first >> 16),
                    four_fp8_codes(table, second), four_fp8_codes(table, second >> 16));
}

}  // namespace minifloat::cuda
