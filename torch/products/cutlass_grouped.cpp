// The engine for FP8 codes with groups, on Hopper: kernels of this library
// (minifloat/grouped_product.h), which round the result once.
//
//     one scale a row or a group                as it is
//     FP4 under power-of-two scales             converted to E4M3 codes first (core/fp4_as_fp8.h)
//     1x128 by 128x128 along rows, 1x128 by     the latter with transposed scales, so that those of
//     1x128 along the contraction dimension     a group are contiguous
#include <ATen/ATen.h>

#include "ops/direct.h"
#include "products/grouped.h"

namespace minifloat::torch_ops {
namespace cutlass_grouped {

bool has_blocks(const Product& product) { return product.a.rule == ScaleRule::kBlock; }

bool has_kernel(const Product& product, bool is_along_rows) {
  const auto operand = [](const Spec& spec) {
    return GroupedOperand{fp8_elements(spec), nullptr, nullptr, scales_of_codes(spec)};
  };
  return has_grouped_kernel(operand(product.a), operand(product.b), is_along_rows);
}

bool supports(const Product& product, int capability) {
  if (capability != kHopper || !has_grouped_products()) return false;
  if (has_blocks(product))
    return product.b.rule == ScaleRule::kBlock &&
           (has_kernel(product, true) || has_kernel(product, false));
  return (has_row_or_group_scales(product) || is_fp4_by_fp8(product)) && has_kernel(product, true);
}

bool takes(const Product& product, int capability, const ProductShape& shape) {
  const bool is_along_rows = shape.along == GroupsAlong::kRows;
  return takes_grouped_codes(product, capability, shape) &&
         (!has_blocks(product) || has_kernel(product, is_along_rows));
}

GroupedSide side_of(const ProductCall& call, bool is_b) {
  GroupedSide side = fp8_codes(call, is_b);
  const Spec& spec = is_b ? call.product.b : call.product.a;
  if (has_blocks(call.product) && call.groups.unit > 0)
    side.scale =
        side.scale.contiguous()
            .view({spec.scale_rows(side.values.size(0)), spec.scale_cols(side.values.size(1))})
            .t();
  side.scale = side.scale.contiguous();
  return side;
}

Tensor multiply(const ProductCall& call) {
  return product_by_kernel(call, side_of(call, false), side_of(call, true), call.product.fast);
}

}  // namespace cutlass_grouped

constinit const Engine kCutlassGrouped = {.name = "cutlass_grouped",
                                          .does = "a grouped FP8 GEMM",
                                          .is_grouped = true,
                                          .supports = cutlass_grouped::supports,
                                          .takes = cutlass_grouped::takes,
                                          .multiply = cutlass_grouped::multiply};

}  // namespace minifloat::torch_ops
