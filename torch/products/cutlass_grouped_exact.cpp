// The exact product of operands with groups on Hopper: this library's bf16 kernel
// (minifloat/grouped_product.h). Pending factors and a bias are part of it, so the result is
// rounded once.
#include <ATen/ATen.h>

#include "products/exact.h"
#include "products/grouped.h"

namespace minifloat::torch_ops {
namespace cutlass_grouped_exact {

// Operands that are both bf16 have no factors: torch's product is as exact.
bool supports(const Product& product, int capability) {
  return capability == kHopper && has_grouped_products() && !product.is_bf16() &&
         !product.a.has_fp32_values() && !product.b.has_fp32_values();
}

// Along the contraction dimension an operand under bf16 is not padded as the other is.
bool takes(const Product& product, int, const ProductShape& shape) {
  const bool is_padded =
      shape.along == GroupsAlong::kRows || (!product.a.is_bf16() && !product.b.is_bf16());
  return shape.has_bf16_rows && is_padded && shape.out_dtype == c10::ScalarType::BFloat16 &&
         shape.m > 0 && shape.n > 0 && shape.k > 0 && shape.n % 8 == 0 && shape.k % 8 == 0;
}

GroupedSide side_of(const ExactSide& side) {
  if (side.factor)
    return {Elements::kBf16, side.values, tensor_factor_of(*side.factor).contiguous(),
            GroupScales::kGroups};
  if (side.row_factors.defined())
    return {Elements::kBf16, side.values, side.row_factors.contiguous(), GroupScales::kRows};
  return {Elements::kBf16, side.values, {}, GroupScales::kNone};
}

Tensor multiply(const ProductCall& call) {
  const Groups of_b = call.groups.unit == 0 ? Groups{} : call.groups;
  const ExactSide a = exact_side(call.product.a, call.a, call.k, call.groups),
                  b = exact_side(call.product.b, call.b, call.k, of_b);
  return product_by_kernel(call, side_of(a), side_of(b), false);
}

}  // namespace cutlass_grouped_exact

constinit const Engine kCutlassGroupedExact = {.name = "cutlass_grouped_exact",
                                               .does = "a grouped bf16 GEMM of the decoded values",
                                               .is_grouped = true,
                                               .supports = cutlass_grouped_exact::supports,
                                               .takes = cutlass_grouped_exact::takes,
                                               .reads_values = true,
                                               .multiply = cutlass_grouped_exact::multiply};

}  // namespace minifloat::torch_ops
