// Products by cuBLASLt itself. An exact one reads its factor on the device, which ATen's products
// cannot. For products of FP8 codes ATen calls cuBLASLt's heuristic each time; here its answer is
// cached.
#pragma once

#include <optional>

#include "products/exact.h"

namespace minifloat::torch_ops {

// Returns a · bᵀ, where a side has a factor of the whole operand and neither has one of its rows:
// values bf16 on CUDA, rows or columns adjacent; plus bias, of the result's dtype and only where
// that is bf16; rounded once. Nothing where this build has no cuBLASLt, or cuBLASLt no kernel for
// the sizes.
std::optional<Tensor> product_by_device_factor(const ExactSide& a, const ExactSide& b,
                                               const Result& result);

// One side of a product of FP8 codes: float8 (rows, k), rows adjacent, and the contiguous fp32
// scale, of the tensor or of each row.
struct Fp8Codes {
  const Tensor &codes, &scale;
};

// Returns a · bᵀ of codes times scales; plus bias, in bf16; rounded once. Nothing where this build
// has no cuBLASLt, or cuBLASLt no kernel for the sizes.
std::optional<Tensor> product_of_codes(const Fp8Codes& a, const Fp8Codes& b, bool has_row_scales,
                                       bool fast, const Result& result);

}  // namespace minifloat::torch_ops
