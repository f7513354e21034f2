// The operands of exact products. Decoded values are multiplied in bf16, or in fp32 where block
// scales have too many bits for bf16 (Spec::has_fp32_values); sums are fp32, rounded once. The
// exact engines support every product and all sizes.
#pragma once

#include "products/engines.h"
#include "products/tensor_factor.h"

namespace minifloat::torch_ops {

// One operand of an exact product.
struct ExactSide {
  Tensor values;  // bf16 or fp32 (rows, k)
  // The pending factors; undefined: none.
  std::optional<TensorFactor> factor;  // of the whole operand, or of each group
  Tensor row_factors;                  // fp32 (rows): has_row_factors
};

// Decodes an operand that is not decoded. groups: of its rows or columns; none where it is one
// matrix a group
ExactSide exact_side(const Spec& spec, const ProductInput& input, std::int64_t k,
                     const Groups& groups = {});

// Returns the product of the pending factors of both operands, of wholes or of groups; undefined:
// none.
Tensor factor_of_both(const ExactSide& a, const ExactSide& b);

// Returns the exact product of two matrices on the CPU.
Tensor exact_product_on_cpu(const ExactSide& a, const ExactSide& b, const Result& result);

// Decodes codes: Engine::prepare of the exact engines.
ProductInput prepare_exact(const Spec& spec, const Codes& codes, const c10::SymInt& cols);

// Engine::takes of the exact engines: true.
bool takes_all(const Product& product, int capability, const ProductShape& shape);

// Whether the values of both operands are bf16, so that a bf16 product multiplies them.
inline bool are_bf16(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == at::kBFloat16 && b.scalar_type() == at::kBFloat16;
}

}  // namespace minifloat::torch_ops
