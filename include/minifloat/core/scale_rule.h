// The map from an amax to scales under each scale rule: the factors of a tensor or a row, and a
// block's scale. The equations are core/scaling.h's. Only this file chooses between them by rule.
// core/eden.h corrects the block scales of ScaleRounding::kEden.
//
//     amax of the tensor   --scale_of_tensor-->  TensorScale      kTensor, kNvfp4
//     amax of a row        --fp32_factors----->  ScaleFactors     kRow
//                          --scale_of_tensor-->  TensorScale      kNvfp4Row
//     amax of a block      --scale_of_block--->  BlockScale       any rule
#pragma once

#include <cstdint>
#include <type_traits>

#include "minifloat/core/format.h"
#include "minifloat/core/host_device.h"
#include "minifloat/core/scaling.h"

namespace minifloat {

// The format of a block's scale.
enum class BlockRule : std::uint8_t { kNone, kFloat32, kE8m0, kE4m3 };
// What an fp32 scale beside those of blocks, or without them, belongs to.
enum class OuterScale : std::uint8_t { kNone, kTensor, kRow };

// A block rule and an outer scale, packed: kernels are compiled for one.
constexpr std::uint8_t scale_rule(BlockRule block, OuterScale outer) {
  return static_cast<std::uint8_t>(static_cast<int>(block) * 4 + static_cast<int>(outer));
}
enum class ScaleRule : std::uint8_t {
  kNone = scale_rule(BlockRule::kNone, OuterScale::kNone),      // bf16
  kTensor = scale_rule(BlockRule::kNone, OuterScale::kTensor),  // fp32, one a matrix
  kRow = scale_rule(BlockRule::kNone, OuterScale::kRow),        // fp32, one a row
  kBlock = scale_rule(BlockRule::kFloat32, OuterScale::kNone),  // fp32, one a block
  kMx = scale_rule(BlockRule::kE8m0, OuterScale::kNone),        // E8M0, one a block
  kNvfp4 =
      scale_rule(BlockRule::kE4m3, OuterScale::kTensor),  // E4M3, one a block; fp32, one a matrix
  kNvfp4Row = scale_rule(BlockRule::kE4m3, OuterScale::kRow),  // E4M3, one a block; fp32, one a row
};
MINIFLOAT_HD constexpr BlockRule block_rule(ScaleRule rule) {
  return static_cast<BlockRule>(static_cast<int>(rule) / 4);
}
MINIFLOAT_HD constexpr OuterScale outer_scale(ScaleRule rule) {
  return static_cast<OuterScale>(static_cast<int>(rule) % 4);
}

// A rounding of the scale that differs from the rule's default.
enum class ScaleRounding : std::uint8_t {
  kDefault,
  kExact,
  kFloor,
  kUp,
  kPowerOfTwo,
  kFourOverSix,
  kEden
};

// ---- Questions about a rule ---------------------------------------------------------------------
// Returns whether fp32 scales are powers of two.
MINIFLOAT_HD constexpr bool is_power_of_two(ScaleRule rule, ScaleRounding rounding) {
  return (rule == ScaleRule::kBlock || rule == ScaleRule::kRow) &&
         rounding != ScaleRounding::kExact;
}
// Returns whether an exact product reads codes alone, because the fp32 scale of the tensor or of a
// row has too many bits for bf16.
MINIFLOAT_HD constexpr bool is_scaled_after_product(ScaleRule rule, ScaleRounding rounding) {
  return block_rule(rule) == BlockRule::kNone && outer_scale(rule) != OuterScale::kNone &&
         !is_power_of_two(rule, rounding);
}
// Returns whether an exact product reads fp32 values, because a block's scale has too many bits for
// bf16.
MINIFLOAT_HD constexpr bool has_fp32_values(ScaleRule rule, ScaleRounding rounding) {
  return block_rule(rule) == BlockRule::kFloat32 && !is_power_of_two(rule, rounding);
}
// Returns whether the codes of a block are zero, without signs, whatever its values.
MINIFLOAT_HD constexpr bool has_zero_codes(ScaleRule rule, std::uint32_t scale_code) {
  return block_rule(rule) == BlockRule::kE4m3 && scale_code == 0;
}
MINIFLOAT_HD constexpr Nvfp4Rounding nvfp4_rounding(ScaleRounding rounding) {
  if (rounding == ScaleRounding::kUp) return Nvfp4Rounding::kUp;
  if (rounding == ScaleRounding::kFourOverSix) return Nvfp4Rounding::kFourOverSix;
  if (rounding == ScaleRounding::kEden) return Nvfp4Rounding::kEden;
  return rounding == ScaleRounding::kPowerOfTwo ? Nvfp4Rounding::kPowerOfTwo
                                                : Nvfp4Rounding::kNearest;
}
// Returns whether a block has two scales, the second of which is taken where the codes under it are
// nearer to the values.
MINIFLOAT_HD constexpr bool has_two_scales(ScaleRounding rounding) {
  return rounding == ScaleRounding::kFourOverSix;
}
// Returns whether the rule reads values: to choose between two scales, or to correct the scale.
MINIFLOAT_HD constexpr bool reads_values(ScaleRounding rounding) {
  return has_two_scales(rounding) || rounding == ScaleRounding::kEden;
}
// Whether elements of format F have rules that read values.
template <class F>
inline constexpr bool kHasRulesOfValues = std::is_same_v<F, E2M1>;
// The sign bit of a block's amax, set where the second of its two scales is taken. In the
// amaxes of partial casts choose_scales sets the bit where the first one is taken instead
// (minifloat/partial_cast.h).
inline constexpr std::uint32_t kSecondScale = 0x8000'0000u;

// ---- Scales -------------------------------------------------------------------------------------
// Returns the factor of elements and the stored scale under kTensor, kRow and kBlock.
template <class F>
MINIFLOAT_HD constexpr ScaleFactors fp32_factors(ScaleRule rule, ScaleRounding rounding,
                                                 std::uint32_t amax) {
  return fp8_factors<F>(amax, is_power_of_two(rule, rounding));
}

// The scale of a whole matrix, or of a row beside those of its blocks.
struct TensorScale {
  float encode;        // kTensor: the factor of elements; blocks: S
  float scale;         // the reciprocal: the factor of a product
  float block_encode;  // blocks: amax of one -> its scale before rounding
  float amax;          // blocks
};
// Returns the scale; zeros under a rule that has none.
template <class F>
MINIFLOAT_HD constexpr TensorScale scale_of_tensor(ScaleRule rule, ScaleRounding rounding,
                                                   std::uint32_t amax) {
  if constexpr (F::kBits == 8) {
    if (rule == ScaleRule::kTensor) {
      const ScaleFactors factors = fp32_factors<F>(rule, rounding, amax);
      return {factors.encode, factors.scale, 0.0f, 0.0f};
    }
  } else {
    if (block_rule(rule) == BlockRule::kE4m3) {
      const Nvfp4Tensor tensor = nvfp4_tensor<F>(amax, nvfp4_rounding(rounding));
      return {tensor.encode, tensor.scale, tensor.block_encode, bit_cast<float>(amax)};
    }
  }
  return {};
}

// The scale of a block; under kTensor and kRow, of a part of the tensor or of the row.
struct BlockScale {
  std::uint32_t code;  // E8M0 or E4M3
  float scale;         // the factor of codes in an exact product
  float encode;        // the factor of elements before encoding
};

// The equations that scale_of_block calls. A backend with faster forms of some passes its own
// class, whose Tensor and Block have at least the members of TensorScale and BlockScale. A test
// compares each such form with core/scaling.h for every input.
struct ScaleEquations {
  using Tensor = TensorScale;
  using Block = BlockScale;

  template <class F>
  MINIFLOAT_HD static constexpr ScaleFactors power_of_two_factors(std::uint32_t amax) {
    return fp8_factors<F>(amax, true);
  }
  template <class F>
  MINIFLOAT_HD static constexpr Block mx(ScaleRounding rounding, std::uint32_t amax) {
    const std::uint32_t code =
        rounding == ScaleRounding::kFloor ? mx_scale_floor<F>(amax) : mx_scale_up<F>(amax);
    return {code, decode_e8m0(code), e8m0_reciprocal(code)};
  }
  MINIFLOAT_HD static constexpr Block nvfp4(ScaleRounding rounding, const Tensor& tensor,
                                            std::uint32_t amax) {
    const std::uint32_t code =
        rounding == ScaleRounding::kFourOverSix
            ? four_over_six_scale(amax & ~kSecondScale, tensor.encode, amax & kSecondScale)
            : nvfp4_block_scale(amax, tensor.block_encode, nvfp4_rounding(rounding));
    return {code, decode<E4M3>(code), nvfp4_encode_factor(code, tensor.scale)};
  }
};

template <class F, class Equations = ScaleEquations>
MINIFLOAT_HD constexpr typename Equations::Block scale_of_block(
    ScaleRule rule, ScaleRounding rounding, const typename Equations::Tensor& tensor,
    std::uint32_t amax) {
  if constexpr (F::kBits == 4) {
    if (block_rule(rule) == BlockRule::kE4m3) return Equations::nvfp4(rounding, tensor, amax);
  } else {
    if (rule == ScaleRule::kTensor) return {0, 1.0f, tensor.encode};
    if (rule == ScaleRule::kRow || rule == ScaleRule::kBlock) {
      const ScaleFactors factors = is_power_of_two(rule, rounding)
                                       ? Equations::template power_of_two_factors<F>(amax)
                                       : fp32_factors<F>(rule, rounding, amax);
      return {0, is_scaled_after_product(rule, rounding) ? 1.0f : factors.scale, factors.encode};
    }
  }
  return Equations::template mx<F>(rounding, amax);
}

// ---- Two scales ---------------------------------------------------------------------------------
// The choice between two scales: the one under which the squared errors of the block's elements, to
// nearest, have the smaller sum; the first where the sums are equal or one is NaN. A sum is taken
// in this order, without a fused multiplication:
//
//     blocks of one row    element after element of the operand's row
//     16 x 16              element after element of each row, then the 16 sums by add_rows. The
//                          rows are those of the matrix x for its transpose, too, which so has the
//                          same scales. A transformed operand has its own rows
//
// Elements past the matrix's edge are zeros, which add nothing.
template <class F>
MINIFLOAT_HD constexpr float squared_error(const TensorScale& tensor, float block_scale,
                                           std::uint32_t code, float x) {
  const float d = four_over_six_value(decode<F>(code), block_scale, tensor.amax) - x;
  return d * d;
}
MINIFLOAT_HD constexpr bool takes_second(float first_error, float second_error) {
  return second_error < first_error;
}
// Adds the sums of a block's 16 rows in place: r and r + 8, then r and r + 4, r and r + 2, r and r
// + 1.
MINIFLOAT_HD constexpr float add_rows(float* rows) {
  for (int half = 8; half > 0; half /= 2)
    for (int r = 0; r < half; ++r) rows[r] = rows[r] + rows[r + half];
  return rows[0];
}

// Calls body.run<rule, rounding>() for a rule of blocks, so that a loop over blocks contains no
// choice.
template <class F, class Body>
MINIFLOAT_HD constexpr void with_block_rule(ScaleRule rule, ScaleRounding rounding,
                                            const Body& body) {
  using enum ScaleRounding;
  switch (rule) {
    case ScaleRule::kMx:
      return rounding == kFloor ? body.template run<ScaleRule::kMx, kFloor>()
                                : body.template run<ScaleRule::kMx, kDefault>();
    case ScaleRule::kBlock:
      if constexpr (F::kBits == 8)
        rounding == kExact ? body.template run<ScaleRule::kBlock, kExact>()
                           : body.template run<ScaleRule::kBlock, kDefault>();
      return;
    case ScaleRule::kNvfp4Row:
      if constexpr (F::kBits == 4)
        rounding == kUp ? body.template run<ScaleRule::kNvfp4Row, kUp>()
                        : body.template run<ScaleRule::kNvfp4Row, kDefault>();
      return;
    case ScaleRule::kNvfp4:
      if constexpr (F::kBits == 4) switch (rounding) {
          case kUp: return body.template run<ScaleRule::kNvfp4, kUp>();
          case kPowerOfTwo: return body.template run<ScaleRule::kNvfp4, kPowerOfTwo>();
          case kFourOverSix:
            if constexpr (kHasRulesOfValues<F>)
              body.template run<ScaleRule::kNvfp4, kFourOverSix>();
            return;
          case kEden:
            if constexpr (kHasRulesOfValues<F>) body.template run<ScaleRule::kNvfp4, kEden>();
            return;
          case kDefault:
          case kExact:
          case kFloor: return body.template run<ScaleRule::kNvfp4, kDefault>();
        }
      return;
    case ScaleRule::kNone:
    case ScaleRule::kTensor:
    case ScaleRule::kRow: return;  // no blocks
  }
}

}  // namespace minifloat
