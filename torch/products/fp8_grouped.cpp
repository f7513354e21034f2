// The engine for E4M3 codes with groups, under one scale a row or a group, on Hopper: ATen's
// grouped FP8 product. FP4 codes under power-of-two scales are converted to E4M3 codes first
// (core/fp4_as_fp8.h). Its result is bf16; a bias is added after that rounding.
#include <ATen/ATen.h>

#include "ops/direct.h"
#include "products/fp8.h"
#include "products/grouped.h"

namespace minifloat::torch_ops {
namespace {

bool supports(const Product& product, int capability) {
  const auto &a = product.a, &b = product.b;
  const bool is_e4m3 = a.elements == Elements::kE4m3 && b.elements == Elements::kE4m3;
  return capability == kHopper &&
         ((is_e4m3 && has_row_or_group_scales(product)) || is_fp4_by_fp8(product));
}

// FP8 codes, float8_e4m3fn, and their scales as ATen reads them: one a row, or a row of a group.
struct Side {
  Tensor codes, scale;
};

// Returns a scale for each row from those of the groups. is_rows: the operand's rows lie in groups;
// else each group has `rows` rows
Tensor spread(const Tensor& scale, const ProductCall& call, bool is_rows, std::int64_t rows) {
  if (is_rows) return scale.index_select(0, group_of_rows(call.groups, rows));
  return scale.unsqueeze(1).expand({scale.size(0), rows}).contiguous();
}

Side side_of(const Spec& spec, const ProductInput& input, const ProductCall& call, bool is_b) {
  const bool is_along_rows = call.groups.unit == 0;
  if (spec.is_fp4_by_powers_of_two()) {
    const Fp4AsFp8 fp8 =
        as_fp8(spec, input, call.k, is_along_rows && is_b ? Groups{} : call.groups);
    return {fp8.codes, fp8.row_scale};
  }
  const Fp8Side fp8 = fp8_side(spec, input);
  const Tensor codes = fp8_view(fp8);
  if (spec.rule == ScaleRule::kRow) return {codes, fp8.scale.contiguous()};
  return {codes, spread(fp8.scale, call, is_along_rows && !is_b, codes.size(-2))};
}

Tensor multiply(const ProductCall& call) {
  const Side a = side_of(call.product.a, call.a, call, false),
             b = side_of(call.product.b, call.b, call, true);
  const bool is_along_rows = call.groups.unit == 0;
  const auto of_rows = [&](const Tensor& scale) {
    return is_along_rows ? scale : scale.reshape(-1);
  };
  const bool fast = call.product.fast && !is_fp4_by_fp8(call.product);
  const Tensor out = at::_scaled_grouped_mm(
      a.codes, b.codes.transpose(-2, -1), of_rows(a.scale), of_rows(b.scale),
      ends_of(call.groups, call.groups.unit), std::nullopt, std::nullopt, at::kBFloat16, fast);
  return is_along_rows ? add_group_bias(out, call.groups, call.result) : out;
}

}  // namespace

constinit const Engine kFp8Grouped = {.name = "fp8_grouped",
                                      .is_grouped = true,
                                      .supports = supports,
                                      .takes = takes_grouped_codes,
                                      .reads_values = false,
                                      .prepare = nullptr,
                                      .multiply = multiply};

}  // namespace minifloat::torch_ops
