// The engine for FP8 codes with groups, on Hopper: kernels of this library
// (minifloat/grouped_product.h), which round the result once.
//
//     one scale a row or a group                as it is
//     FP4 under power-of-two scales             converted to E4M3 codes first (core/fp4_as_fp8.h)
//     1x128 by 128x128 along rows, 1x128 by     the latter with transposed scales, so that those of
//     1x128 along the contraction dimension     a group are contiguous
#include <ATen/ATen.h>

#include "ops/direct.h"
#include "products/fp8.h"
#include "products/grouped.h"

namespace minifloat::torch_ops {
namespace {

bool has_blocks(const Product& product) { return product.a.rule == ScaleRule::kBlock; }

GroupScales scales_of(const Spec& spec) {
  switch (spec.rule) {
    case ScaleRule::kRow: return GroupScales::kRows;
    case ScaleRule::kBlock:
      return spec.block_rows == 1 ? GroupScales::k1x128 : GroupScales::k128x128;
    default: return GroupScales::kGroups;
  }
}

bool has_kernel(const Product& product, bool is_along_rows) {
  const auto operand = [](const Spec& spec) {
    return GroupedOperand{spec.elements, nullptr, nullptr, scales_of(spec)};
  };
  return has_grouped_kernel(operand(product.a), operand(product.b), is_along_rows);
}

bool supports(const Product& product, int capability) {
  if (capability != kHopper || !has_grouped_products()) return false;
  if (is_fp4_by_fp8(product)) return true;
  if (has_blocks(product))
    return product.b.rule == ScaleRule::kBlock &&
           (has_kernel(product, true) || has_kernel(product, false));
  return product.a.is_fp8() && has_row_or_group_scales(product) && has_kernel(product, true);
}

bool takes(const Product& product, int capability, const ProductShape& shape) {
  const bool is_along_rows = shape.along == GroupsAlong::kRows;
  return takes_grouped_codes(product, capability, shape) &&
         (!has_blocks(product) || has_kernel(product, is_along_rows));
}

// groups: of the operand's rows or columns; none where it is one matrix a group
GroupedSide side_of(const Spec& spec, const ProductInput& input, std::int64_t k,
                    const Groups& groups) {
  if (spec.is_fp4_by_powers_of_two()) {
    const Fp4AsFp8 fp8 = as_fp8(spec, input, k, groups);
    return {Elements::kE4m3, fp8.codes, fp8.row_scale, GroupScales::kRows};
  }
  const Fp8Side fp8 = fp8_side(spec, input);
  const auto transposed = [&] {
    const Tensor& codes = fp8.codes;
    return scale_view(fp8, {spec.scale_rows(codes.size(0)), spec.scale_cols(codes.size(1))}).t();
  };
  const bool is_along_contraction = groups.unit > 0;
  const Tensor scale =
      spec.rule == ScaleRule::kBlock && is_along_contraction ? transposed() : fp8.scale;
  return {spec.elements, fp8.codes, scale.contiguous(), scales_of(spec)};
}

Tensor multiply(const ProductCall& call) {
  const Groups of_b = call.groups.unit == 0 ? Groups{} : call.groups;
  return product_by_kernel(call, side_of(call.product.a, call.a, call.k, call.groups),
                           side_of(call.product.b, call.b, call.k, of_b),
                           call.product.fast && !is_fp4_by_fp8(call.product));
}

}  // namespace

constinit const Engine kCutlassGrouped = {.name = "cutlass_grouped",
                                          .is_grouped = true,
                                          .supports = supports,
                                          .takes = takes,
                                          .reads_values = false,
                                          .prepare = nullptr,
                                          .multiply = multiply};

}  // namespace minifloat::torch_ops
