// The engine for E4M3 codes with groups, under one scale a row or a group, on Hopper: ATen's
// grouped FP8 product. FP4 codes under power-of-two scales are converted to E4M3 codes first
// (core/fp4_as_fp8.h). Its result is bf16; a bias is added after that rounding.
#include <ATen/ATen.h>

#include "products/grouped.h"

namespace minifloat::torch_ops {
namespace fp8_grouped {

bool supports(const Product& product, int capability) {
  const bool is_e4m3 =
      fp8_elements(product.a) == Elements::kE4m3 && fp8_elements(product.b) == Elements::kE4m3;
  return capability == kHopper && is_e4m3 &&
         (has_row_or_group_scales(product) || is_fp4_by_fp8(product));
}

// Returns a scale for each row of an operand, as ATen reads them.
Tensor row_scale(const GroupedSide& side, const ProductCall& call, bool is_b) {
  if (side.scales == GroupScales::kRows) return side.scale.contiguous();
  const std::int64_t rows = side.values.size(-2);
  if (call.groups.unit == 0 && !is_b)
    return side.scale.index_select(0, group_of_rows(call.groups, rows));
  return side.scale.unsqueeze(1).expand({side.scale.size(0), rows}).contiguous();
}

Tensor multiply(const ProductCall& call) {
  const GroupedSide a = fp8_codes(call, false), b = fp8_codes(call, true);
  const bool is_along_rows = call.groups.unit == 0;
  const auto scale_of = [&](const GroupedSide& side, bool is_b) {
    const Tensor scale = row_scale(side, call, is_b);
    return is_along_rows ? scale : scale.reshape(-1);
  };
  const Tensor out =
      at::_scaled_grouped_mm(a.values, b.values.transpose(-2, -1), scale_of(a, false),
                             scale_of(b, true), ends_of(call.groups, call.groups.unit),
                             std::nullopt, std::nullopt, at::kBFloat16, call.product.fast);
  return is_along_rows ? add_group_bias(out, call.groups, call.result) : out;
}

}  // namespace fp8_grouped

constinit const Engine kFp8Grouped = {.name = "fp8_grouped",
                                      .does = "a grouped FP8 GEMM",
                                      .is_grouped = true,
                                      .supports = fp8_grouped::supports,
                                      .takes = takes_grouped_codes,
                                      .multiply = fp8_grouped::multiply};

}  // namespace minifloat::torch_ops
