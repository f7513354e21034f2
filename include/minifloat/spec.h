// An operand spec: element format + scale rule + block shape + rounding + transform, and its text
// form.
//
//     operand = elements [ "/e5m2" ] [ "/" block ] { "+" flag }
//     examples: nvfp4/16x16   mxfp8/e5m2+floor   nvfp4+sr+rht
//
//     bf16                                     identity
//     e4m3/tensor  e5m2/tensor                 one fp32 scale; +delayed: from an amax history
//     e4m3/row                                 fp32 power of two a row; +exact: any fp32
//     e4m3/1x128   e4m3/128x128                fp32 power of two a block; +exact: any fp32
//     mxfp8  mxfp8/e5m2  mxfp8/32x32  mxfp4    E8M0 a block, rounded up; +floor: the OCP rule
//     nvfp4  nvfp4/16x16                       E4M3 a block and fp32 a tensor; +up, +pow2: block
//                                              scale rounded up; +4over6: of two block scales,
//                                              the one with the smaller error
//     e1m2/1x16  e1m2/16x16                    nvfp4's rule for a uniform grid; +up, +pow2
//     e1m2/1x32                                mxfp4's rule for a uniform grid; +floor
//     nvfp4/row                                E4M3 a block and fp32 a row; +up
//     nvfp4+eden                               block scales that correct the codes' error, rounded
//                                              stochastically, after an RHT of 128 points with new
//                                              signs in each step
//     all except bf16 and nvfp4+eden           +sr: stochastic rounding
//                                              +rht, +rht32, +rht64, +rht128
//     fprop.w  fprop.x                         in a recipe's dgrad and wgrad: the values of the
//                                              codes that fprop read, in the compute dtype
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "minifloat/core/block.h"
#include "minifloat/core/format.h"
#include "minifloat/core/groups.h"
#include "minifloat/core/scale_rule.h"

namespace minifloat {

enum class Elements : std::uint8_t { kBf16, kE4m3, kE5m2, kE2m1, kE1m2 };
inline constexpr std::array kAllElements = {Elements::kBf16, Elements::kE4m3, Elements::kE5m2,
                                            Elements::kE2m1, Elements::kE1m2};

// Return the value of a format's table. A format without its own function does not compile.
constexpr Elements elements_of(E4M3) { return Elements::kE4m3; }
constexpr Elements elements_of(E5M2) { return Elements::kE5m2; }
constexpr Elements elements_of(E2M1) { return Elements::kE2m1; }
constexpr Elements elements_of(E1M2) { return Elements::kE1m2; }

// Returns the bits of a code; 8 for bf16, which has none.
constexpr int code_bits_of(Elements elements) {
  switch (elements) {
    case Elements::kE4m3: return E4M3::kBits;
    case Elements::kE5m2: return E5M2::kBits;
    case Elements::kE2m1: return E2M1::kBits;
    case Elements::kE1m2: return E1M2::kBits;
    case Elements::kBf16: break;
  }
  return 8;
}

enum class ScaleType : std::uint8_t { kNone, kFloat32, kE8m0, kE4m3 };

// The operand of fprop whose codes backward decodes; see Recipe.
enum class ForwardOperand : std::uint8_t { kNone, kX, kW };

struct Spec {
  Elements elements = Elements::kBf16;
  ScaleRule rule = ScaleRule::kNone;
  int block_rows = 0;  // of rules with blocks
  int block_cols = 0;
  ScaleRounding scale_rounding = ScaleRounding::kDefault;
  bool stochastic = false;  // codes are rounded so, or under kEden scales: the cast reads a Random
  bool delayed = false;
  int transform = 0;                                  // points of the Hadamard transform; 0: none
  ForwardOperand of_forward = ForwardOperand::kNone;  // whose values these are; else bf16's

  // Parses a spec. Throws Error with the position, what was found there and what is legal.
  static Spec parse(std::string_view text);
  std::string str() const;  // canonical: parse(str()) == *this
  bool operator==(const Spec&) const = default;
  // Returns whether parse returns such a spec, which is no name of an operand of fprop.
  bool is_valid() const;

  // Returns whether a product reads values; also of an operand of fprop, whose values they are.
  bool is_bf16() const { return elements == Elements::kBf16; }
  bool is_of_forward() const { return of_forward != ForwardOperand::kNone; }
  bool is_fp8() const { return elements == Elements::kE4m3 || elements == Elements::kE5m2; }
  int code_bits() const { return code_bits_of(elements); }
  // Returns whether codes of 4 bits are under block scales 2^k, so that E4M3 codes can hold their
  // values (core/fp4_as_fp8.h).
  bool is_fp4_by_powers_of_two() const {
    return code_bits() == 4 &&
           (rule == ScaleRule::kMx || scale_rounding == ScaleRounding::kPowerOfTwo);
  }
  bool has_tensor_amax() const { return outer_scale(rule) == OuterScale::kTensor; }
  bool is_eden() const { return scale_rounding == ScaleRounding::kEden; }
  bool rounds_codes_stochastically() const { return stochastic && !is_eden(); }
  // Returns whether scales depend on a block's values beyond their amax.
  bool reads_values() const { return minifloat::reads_values(scale_rounding); }
  bool has_row_amax() const { return outer_scale(rule) == OuterScale::kRow; }
  bool has_blocks() const { return block_rows > 0; }
  // A cut at multiples of these splits no block, transform or byte of codes.
  int row_alignment() const { return std::max(block_rows, 1); }
  int col_alignment() const { return std::max({block_cols, transform, code_bits() == 4 ? 2 : 1}); }
  // Returns whether the fp32 scales of the tensor or of rows are computed from their amaxes, beside
  // which the scales of blocks are stored.
  bool has_outer_amax() const { return has_blocks() && outer_scale(rule) != OuterScale::kNone; }
  bool has_outer_row_amax() const { return has_blocks() && has_row_amax(); }
  // Returns whether an exact product reads fp32 values; else it reads bf16 ones.
  bool has_fp32_values() const { return minifloat::has_fp32_values(rule, scale_rounding); }
  ScaleType scale_type() const;
  // Returns whether blocks span rows, so that the end of a group of rows would cut one.
  bool has_blocks_2d() const { return block_rows > 1; }
  // Whether the codes of a row depend on no other row and on no random bits.
  bool casts_rows_alone() const {
    return !(is_bf16() || stochastic || delayed || has_blocks_2d() || has_tensor_amax());
  }
  // Returns the least unit of groups along the contraction dimension (core/groups.h).
  int group_unit() const {
    return std::max({code_bits() == 4 ? 2 * kSmallestUnit : kSmallestUnit, block_cols, transform});
  }

  // Return sizes of an operand read as (rows, cols); Int may be symbolic. The contraction length of
  // a transformed operand grows to whole transforms.
  template <class Int>
  Int padded_cols(Int cols) const {
    return transform == 0 ? cols : round_up<Int>(cols, Int(transform));
  }
  template <class Int>  // bytes of a row of codes
  Int code_cols(Int cols) const {
    const Int padded = padded_cols(cols);
    return code_bits() == 4 ? ceil_div<Int>(padded, Int(2)) : padded;
  }
  template <class Int>  // of rules with blocks
  Int scale_rows(Int rows) const {
    return ceil_div<Int>(rows, Int(block_rows));
  }
  template <class Int>
  Int scale_cols(Int cols) const {
    return ceil_div<Int>(padded_cols(cols), Int(block_cols));
  }
  // Returns the bytes of a scale.
  std::int64_t scale_bytes() const { return scale_type() == ScaleType::kFloat32 ? 4 : 1; }
};

}  // namespace minifloat
