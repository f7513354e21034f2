// The product of two quantized operands, as layers call it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "products/engines.h"
#include "products/inputs.h"

namespace minifloat::torch_ops {

// Returns a · bᵀ over k, (m, n): by the planned engine, or the next one that accepts the sizes.
// Calls the op, or skips the dispatcher where all tensors can (ops/direct.h). With groups: see
// GroupsAlong. They lie along rows where their unit is 0; b is then (E, n, k), and bias (E, n).
// Else k is the rows that the groups divide, and an operand under bf16 is not padded. zeroes_tail:
// rows of the result past the last group are zero; else they are not written.
Tensor scaled_mm(const PlannedProduct& planned, const ProductInput& a, const ProductInput& b,
                 const c10::SymInt& k, const std::optional<Tensor>& bias, at::ScalarType out_dtype,
                 const Groups& groups = {}, bool zeroes_tail = false);

// Adds a · bᵀ over k to `sum`, fp32 (m, n): in the product's kernel where the planned engine can,
// else as one addition of the fp32 product. Calls the op add_scaled_mm, as scaled_mm calls its op.
void add_scaled_mm(const PlannedProduct& planned, const ProductInput& a, const ProductInput& b,
                   const c10::SymInt& k, const Tensor& sum);

// Returns the sums of the rows of each group, (E, n) fp32.   x: (M, n), fp32 or bf16
Tensor sum_of_groups(const Tensor& x, const Tensor& table);

// Returns the length of quantized operands along the contraction dimension.   k: as in scaled_mm
c10::SymInt length_of(const c10::SymInt& k, const Groups& groups);

// Requires the groups, the shapes and the dtypes of a product's operands. op: for errors.
void check_operands(const char* op, const Product& product, const ProductInput& a,
                    const ProductInput& b, const c10::SymInt& k, const Groups& groups);

// Returns an operand in the form that the planned engine reads, for use in several products.
// spec: of the operand.
ProductInput prepare_input(const PlannedProduct& planned, const Spec& spec, ProductInput input,
                           const c10::SymInt& cols);

}  // namespace minifloat::torch_ops
