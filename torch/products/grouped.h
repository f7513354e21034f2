// Shared parts of the engines that multiply operands with groups on CUDA. All read the table of
// groups, on the device. The host waits only where torch multiplies fp32 (exact_grouped_cuda.cpp).
#pragma once

#include "minifloat/grouped_product.h"
#include "products/engines.h"
#include "products/fp8.h"

namespace minifloat::torch_ops {

// Whether both operands have one scale a row, or both one a group.
inline bool has_row_or_group_scales(const Product& product) {
  const ScaleRule rule = product.a.rule;
  return rule == product.b.rule && (rule == ScaleRule::kRow || rule == ScaleRule::kTensor);
}

// Warns once of a product with groups on a GPU for which this build lacks its kernels: torch's
// multiply then.
void warn_without_kernels(int capability);

// Engine::takes of the engines of FP8 codes: takes_codes, and the result is bf16.
bool takes_grouped_codes(const Product& product, int capability, const ProductShape& shape);

// Returns the groups' ends as torch's grouped products read them, int32 (groups): among rows, or
// among columns under a unit.
Tensor ends_of(const Groups& groups, std::int64_t unit);

// Returns the group of each of `rows` rows, int64 (rows); that of rows past the last end is the
// last.
Tensor group_of_rows(const Groups& groups, std::int64_t rows);

// Adds the bias of each row's group to sums (M, n), rounded to the result's dtype.
Tensor add_group_bias(const Tensor& sums, const Groups& groups, const Result& result);

// An operand of this library's grouped kernels, contiguous.
struct GroupedSide {
  Elements elements;
  Tensor values;  // codes, or bf16 values
  Tensor scale;   // fp32; undefined: none
  GroupScales scales = GroupScales::kNone;
};

// Returns the parts of an operand of FP8 codes that have one scale each. FP4 codes under
// power-of-two scales become FP8 codes under scales of rows.
GroupScales scales_of_codes(const Spec& spec);

// Returns an operand as FP8 codes, float8, and its scales as the cast wrote them. FP4 codes under
// power-of-two scales are converted (core/fp4_as_fp8.h).
GroupedSide fp8_codes(const ProductCall& call, bool is_b);

// Returns the product by this library's kernels (minifloat/grouped_product.h), rounded to bf16
// once.
Tensor product_by_kernel(const ProductCall& call, const GroupedSide& a, const GroupedSide& b,
                         bool fast);

}  // namespace minifloat::torch_ops
