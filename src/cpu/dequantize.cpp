// Codes -> values, a row of an operand at a time.
#include <algorithm>
#include <span>
#include <vector>

#include "backends.h"
#include "encode_tile.h"
#include "grouped.h"
#include "parallel.h"
#include "with_format.h"

namespace minifloat::cpu {
namespace {

// Columns of a row that share a factor: those of a group along the contraction dimension, or all.
struct Segment {
  std::int64_t part, begin, end;  // part: the matrix or group; columns
};

struct RowArgs {
  const Quantized* operand;
  std::int64_t row;      // of all the batch's rows
  bool for_product;      // the values of an exact product, or the values themselves
  const float* factors;  // (Quantized::factors): of each value
  std::span<const Segment> segments;
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
      const bool has_row = spec.rule == ScaleRule::kRow && !is_after_product;
      const auto* scales = static_cast<const float*>(q.scale);
      for (const Segment& segment : args.segments) {
        const std::int64_t first = q.groups.unit > 0 ? segment.part * q.rows : 0;
        const float s = has_row ? scales[first + args.row] : 1.0f;
        for (std::int64_t c = segment.begin; c < segment.end; ++c) args.scale[c] = s;
      }
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
    for (const Segment& segment : args.segments) decode_segment(args, segment, codes);
  }

  MINIFLOAT_INLINE static void decode_segment(const RowArgs& args, const Segment& segment,
                                              const std::uint8_t* codes) {
    const std::int64_t first = segment.begin, count = segment.end - first;
    if (args.for_product)
      return for_product(codes + first, args.scale + first, args.bf16 + first, count);
    const Quantized& q = *args.operand;
    const std::int64_t row = (q.groups.unit > 0 ? segment.part * q.rows : 0) + args.row;
    const float factor = args.factors[q.spec.has_outer_row_amax() ? row : segment.part];
    if (args.bf16)
      return to_bf16(codes + first, args.scale + first, factor, args.bf16 + first, count);
    to_fp32(codes + first, args.scale + first, factor, args.fp32 + first, count);
  }
};

// The segments of rows: one list for all, or of each row that is read one.
class RowSegments {
 public:
  explicit RowSegments(const Quantized& q) : q_(q), padded_(q.spec.padded_cols(q.cols)) {
    if (q.groups && q.groups.unit > 0)
      each_group(q.groups, [&](const Group& group) {
        of_groups_.push_back({group.index, group.first_col, group.first_col + group.cols});
      });
  }
  // Returns the number of rows that are read: groups along rows may end before the last row.
  std::int64_t rows() const {
    if (!q_.groups || q_.groups.unit > 0) return q_.batch * q_.rows;
    return q_.groups.of_rows()[q_.groups.count];
  }
  // Returns the segments of a row. memory: for one that is the whole row
  std::span<const Segment> of(std::int64_t row, Segment& memory) const {
    if (q_.groups && q_.groups.unit > 0) return of_groups_;
    memory = {part_of(row), 0, padded_};
    return {&memory, 1};
  }

 private:
  std::int64_t part_of(std::int64_t row) const {
    if (!q_.groups) return row / q_.rows;
    return group_at(q_.groups.of_rows(), q_.groups.count, static_cast<std::int32_t>(row));
  }

  const Quantized& q_;
  std::int64_t padded_;
  std::vector<Segment> of_groups_;
};

void decode_rows(const Quantized& q, bool for_product, std::uint16_t* bf16, float* fp32,
                 const Execution& execution) {
  const RowSegments segments(q);
  const std::int64_t padded = q.spec.padded_cols(q.cols), rows = segments.rows();
  std::vector<float> factors(static_cast<std::size_t>(q.factors()));
  if (!for_product) cpu::tensor_factor(q, factors.data(), execution);
  constexpr std::int64_t kRows = 16;  // of a part of the work
  parallel_for(execution, ceil_div(rows, kRows), rows * padded, [&](std::int64_t part) {
    std::vector<float> scale(static_cast<std::size_t>(padded));
    std::vector<std::uint8_t> unpacked(static_cast<std::size_t>(padded + 1));
    for (std::int64_t r = part * kRows; r < std::min(rows, (part + 1) * kRows); ++r) {
      Segment whole;
      const RowArgs args = {.operand = &q,
                            .row = r,
                            .for_product = for_product,
                            .factors = factors.data(),
                            .segments = segments.of(r, whole),
                            .scale = scale.data(),
                            .unpacked = unpacked.data(),
                            .bf16 = bf16 ? bf16 + r * padded : nullptr,
                            .fp32 = fp32 ? fp32 + r * padded : nullptr};
      with_format(q.spec.elements, [&]<class F>(F) { run_widest<DecodeRow<F>>(args); });
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
  const Spec& spec = operand.spec;
  for (std::int64_t e = 0; e < operand.factors(); ++e) {
    if (spec.rule == ScaleRule::kTensor)
      out[e] = static_cast<const float*>(operand.scale)[e];
    else if (spec.has_outer_amax())
      with_format(spec.elements, [&]<class F>(F) {
        out[e] = scale_of_tensor<F>(spec.rule, spec.scale_rounding, magnitude_bits(operand.amax[e]))
                     .scale;
      });
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
