// Casts of FP4 operands that are written as FP8 (Operand::as_fp8), in two steps: a cast to FP4 and
// a conversion. Backends use them where no kernel does both.
#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "minifloat/quantize.h"

namespace minifloat {

inline bool is_as_fp8(const Operand* operand) { return operand && operand->as_fp8; }

// One direction of a cast: the FP4 operand, in the memory passed to `place`, and its conversion.
class Fp4Cast {
 public:
  Fp4Cast(const TensorRef& x, const Operand& to, bool columnwise) : operand_(to) {
    if (!to.as_fp8) return;
    Quantized& q = conversion_.operand;
    q.spec = to.spec;
    q.batch = x.batch;
    q.rows = columnwise ? x.cols : x.rows;
    q.cols = columnwise ? x.rows : x.cols;
    q.device = x.device;
    q.groups = x.groups;
    if (x.groups && columnwise)
      q.cols = grouped_cols<std::int64_t>(x.rows, x.groups.unit, x.groups.count);
    if (!columnwise) q.groups.unit = 0;
    codes_ = aligned(q.batch * q.rows * q.spec.code_cols(q.cols));
    scales_ = aligned(q.batch * q.spec.scale_rows(q.rows) * q.spec.scale_cols(q.cols));
    if (q.spec.has_tensor_amax() && !to.amax)
      amaxes_ = aligned(q.parts() * static_cast<std::int64_t>(sizeof(float)));
    conversion_.codes = to.codes;
    conversion_.row_scale = static_cast<float*>(to.scale);
  }

  // Returns the bytes of the FP4 operand; 0 where the operand is not written as FP8.
  std::size_t bytes() const { return static_cast<std::size_t>(codes_ + scales_ + amaxes_); }
  // Puts the FP4 operand at `memory`, which is aligned to kAlignment. Returns its end.
  std::byte* place(std::byte* memory) {
    if (!operand_.as_fp8) return memory;
    Quantized& q = conversion_.operand;
    operand_.as_fp8 = false;
    operand_.codes = reinterpret_cast<std::uint8_t*>(memory);
    operand_.scale = memory + codes_;
    if (amaxes_ > 0) operand_.amax = reinterpret_cast<float*>(memory + codes_ + scales_);
    q.codes = operand_.codes, q.scale = operand_.scale, q.amax = operand_.amax;
    return memory + bytes();
  }

  const Operand& operand() const { return operand_; }
  const Fp4AsFp8Cast& conversion() const { return conversion_; }

 private:
  static constexpr std::int64_t kAlignment = 256;
  static std::int64_t aligned(std::int64_t bytes) {
    return round_up<std::int64_t>(bytes, kAlignment);
  }

  Operand operand_;
  Fp4AsFp8Cast conversion_;
  std::int64_t codes_ = 0, scales_ = 0, amaxes_ = 0;
};

// Casts each direction to its spec, then converts the FP4 codes of those that are written as FP8.
//   memory_of(bytes): returns memory for the FP4 operands
//   Backend: cpu's or cuda's `quantize` and `fp4_as_fp8`
template <class Backend, class MemoryOf>
void quantize_in_two_steps(const TensorRef& x, const Operand* rowwise, const Operand* columnwise,
                           const Execution& execution, MemoryOf memory_of) {
  static constexpr Operand kAbsent = {};
  Fp4Cast row(x, rowwise ? *rowwise : kAbsent, false),
      col(x, columnwise ? *columnwise : kAbsent, true);
  col.place(row.place(memory_of(row.bytes() + col.bytes())));
  Backend::quantize(x, rowwise ? &row.operand() : nullptr, columnwise ? &col.operand() : nullptr,
                    execution);
  std::array<Fp4AsFp8Cast, 2> conversions;
  std::size_t count = 0;
  if (is_as_fp8(rowwise)) conversions[count++] = row.conversion();
  if (is_as_fp8(columnwise)) conversions[count++] = col.conversion();
  Backend::fp4_as_fp8(std::span(conversions.data(), count), execution);
}

}  // namespace minifloat
