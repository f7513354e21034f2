// Codes -> values, a row of an operand at a time.
#include <algorithm>
#include <vector>

#include "backend.h"
#include "encode_tile.h"
#include "parallel.h"

namespace minifloat::cpu {
namespace {

struct RowArgs {
  const Quantized* operand;
  std::int64_t row;        // of all the batch's rows
  bool for_product;        // the values of an exact product, or the values themselves
  const float* factors;    // (batch): the tensor scale, a factor of each value
  float* scale;            // (padded) scratch
  std::uint8_t* unpacked;  // (padded, and one where that is odd) scratch
  std::uint16_t* bf16;     // (padded), or
  float* fp32;             // (padded)
};

template <class F>
struct DecodeRow {
  // Spreads the scale of each block over its elements in the row, without the tensor's.
  MINIFLOAT_INLINE static void spread_scales(const RowArgs& args, std::int64_t padded) {
    const Quantized& q = *args.operand;
    const Spec& spec = q.spec;
    if (!spec.has_blocks()) {
      const bool is_after_product =
          args.for_product && is_scaled_after_product(spec.rule, spec.scale_rounding);
      const bool row = spec.rule == ScaleRule::kRow && !is_after_product;
      const float s = row ? static_cast<const float*>(q.scale)[args.row] : 1.0f;
      for (std::int64_t c = 0; c < padded; ++c) args.scale[c] = s;
      return;
    }
    const std::int64_t cols = spec.scale_cols(q.cols);
    const std::int64_t block_row =
        args.row / q.rows * spec.scale_rows(q.rows) + args.row % q.rows / spec.block_rows;
    for (std::int64_t b = 0; b < cols; ++b) {
      const std::int64_t at = block_row * cols + b;
      const std::uint32_t code =
          spec.rule == ScaleRule::kBlock ? 0 : static_cast<const std::uint8_t*>(q.scale)[at];
      const float s = spec.rule == ScaleRule::kBlock ? static_cast<const float*>(q.scale)[at]
                      : spec.rule == ScaleRule::kMx  ? decode_e8m0(code)
                                                     : decode<E4M3>(code);
      const std::int64_t end =
          (b + 1) * spec.block_cols < padded ? (b + 1) * spec.block_cols : padded;
      for (std::int64_t c = b * spec.block_cols; c < end; ++c) args.scale[c] = s;
    }
  }

  // Unpacks one code a byte, in any format.
  MINIFLOAT_INLINE static const std::uint8_t* unpack(const std::uint8_t* __restrict packed,
                                                     std::uint8_t* __restrict codes,
                                                     std::int64_t bytes) {
    if constexpr (F::kBits == 8) return packed;
    for (std::int64_t i = 0; i < bytes; ++i) {
      codes[2 * i] = packed[i] & 0x0F;
      codes[2 * i + 1] = packed[i] >> 4;
    }
    return codes;
  }

  MINIFLOAT_INLINE static void for_product(const std::uint8_t* __restrict codes,
                                           const float* __restrict scale,
                                           std::uint16_t* __restrict out, std::int64_t count) {
    for (std::int64_t c = 0; c < count; ++c) out[c] = product_value(decode<F>(codes[c]) * scale[c]);
  }

  MINIFLOAT_INLINE static void to_bf16(const std::uint8_t* __restrict codes,
                                       const float* __restrict scale, float factor,
                                       std::uint16_t* __restrict out, std::int64_t count) {
    for (std::int64_t c = 0; c < count; ++c)
      out[c] = static_cast<std::uint16_t>(encode_bf16(decode<F>(codes[c]) * scale[c] * factor));
  }

  MINIFLOAT_INLINE static void to_fp32(const std::uint8_t* __restrict codes,
                                       const float* __restrict scale, float factor,
                                       float* __restrict out, std::int64_t count) {
    for (std::int64_t c = 0; c < count; ++c) out[c] = decode<F>(codes[c]) * scale[c] * factor;
  }

  MINIFLOAT_INLINE static void run(const RowArgs& args) {
    const Quantized& q = *args.operand;
    const std::int64_t padded = q.spec.padded_cols(q.cols), bytes = q.spec.code_cols(q.cols);
    spread_scales(args, padded);
    const std::uint8_t* codes = unpack(q.codes + args.row * bytes, args.unpacked, bytes);
    if (args.for_product) return for_product(codes, args.scale, args.bf16, padded);
    const float factor = args.factors[args.row / q.rows];
    if (args.bf16) return to_bf16(codes, args.scale, factor, args.bf16, padded);
    to_fp32(codes, args.scale, factor, args.fp32, padded);
  }
};

void decode_rows(const Quantized& q, bool for_product, std::uint16_t* bf16, float* fp32,
                 const Execution& execution) {
  const std::int64_t padded = q.spec.padded_cols(q.cols), rows = q.batch * q.rows;
  std::vector<float> factors(static_cast<std::size_t>(q.batch));
  if (!for_product) cpu::tensor_factor(q, factors.data(), execution);
  constexpr std::int64_t kRows = 16;  // of a part of the work
  parallel_for(execution, ceil_div(rows, kRows), rows * padded, [&](std::int64_t part) {
    std::vector<float> scale(static_cast<std::size_t>(padded));
    std::vector<std::uint8_t> unpacked(static_cast<std::size_t>(padded + 1));
    for (std::int64_t r = part * kRows; r < std::min(rows, (part + 1) * kRows); ++r) {
      const RowArgs args = {.operand = &q,
                            .row = r,
                            .for_product = for_product,
                            .factors = factors.data(),
                            .scale = scale.data(),
                            .unpacked = unpacked.data(),
                            .bf16 = bf16 ? bf16 + r * padded : nullptr,
                            .fp32 = fp32 ? fp32 + r * padded : nullptr};
      switch (q.spec.elements) {
        case Elements::kE4m3: run_widest<DecodeRow<E4M3>>(args); break;
        case Elements::kE5m2: run_widest<DecodeRow<E5M2>>(args); break;
        case Elements::kE2m1: run_widest<DecodeRow<E2M1>>(args); break;
        case Elements::kBf16: break;
      }
    }
  });
}

}  // namespace

void dequantize(const Quantized& operand, DType dtype, void* out, const Execution& execution) {
  const bool fp32 = dtype == DType::kFloat32;
  decode_rows(operand, false, fp32 ? nullptr : static_cast<std::uint16_t*>(out),
              fp32 ? static_cast<float*>(out) : nullptr, execution);
}

void decode_for_product(const Quantized& operand, std::uint16_t* out, const Execution& execution) {
  decode_rows(operand, true, out, nullptr, execution);
}

void tensor_factor(const Quantized& operand, float* out, const Execution&) {
  for (std::int64_t e = 0; e < operand.batch; ++e) {
    if (operand.spec.rule == ScaleRule::kTensor)
      out[e] = static_cast<const float*>(operand.scale)[e];
    else if (operand.spec.rule == ScaleRule::kNvfp4)
      out[e] = scale_of_tensor<E2M1>(operand.spec.rule, operand.spec.scale_rounding,
                                     magnitude_bits(operand.amax[e]))
                   .scale;
    else
      out[e] = 1.0f;
  }
}

void product_factor(const Quantized& a, const Quantized& b, float* out,
                    const Execution& execution) {
  float of_a = 0, of_b = 0;
  cpu::tensor_factor(a, &of_a, execution);
  cpu::tensor_factor(b, &of_b, execution);
  out[0] = 0.0f;
  out[1] = of_a * of_b;
}

}  // namespace minifloat::cpu
