// Products by direct calls of cuBLASLt. They read the factor of an exact product from device
// memory, which ATen's products cannot. For products of FP8 codes they cache the kernel that
// cuBLASLt's heuristic chooses, where ATen calls the heuristic each time.
#pragma once

#include <optional>

#include "products/exact.h"

namespace minifloat::torch_ops {

// With result.sum, the functions below add the product to it, in the product's kernel, and return
// it. The sum is fp32 in the kernel: alpha times the product's sum, plus the old sum.

// Returns a · bᵀ of bf16 values, rounded once, without factors and bias. Layouts are those of
// product_by_device_factor. Returns nullopt where it does, and for empty operands.
std::optional<Tensor> product_of_values(const Tensor& a, const Tensor& b, const Result& result);

// Returns a · bᵀ times the factors of both operands, plus bias, rounded once. At least one operand
// has a factor and none has row factors. values: bf16 on CUDA, rows or columns adjacent. bias: of
// the result's dtype, which is then bf16. Returns nullopt where this build has no cuBLASLt, or
// cuBLASLt no kernel for the sizes.
std::optional<Tensor> product_by_device_factor(const ExactSide& a, const ExactSide& b,
                                               const Result& result);

// The fp32 scales of FP8 codes (rows, k), in cuBLASLt's order in memory.
enum class ScaleMode {
  kTensor,         // one
  kRows,           // (rows)
  kBlocks1x128,    // (k / 128, rows)
  kBlocks128x128,  // (rows / 128, k / 128 rounded up to a multiple of 4)
};

// One operand of a product of FP8 codes. codes: float8 (rows, k), row-major
struct Fp8Codes {
  const Tensor &codes, &scale;
  ScaleMode mode;
};

// Returns a · bᵀ of codes times scales, plus a bf16 bias, rounded once. Returns nullopt where this
// build has no cuBLASLt, or cuBLASLt no kernel for the sizes.
std::optional<Tensor> product_of_codes(const Fp8Codes& a, const Fp8Codes& b, bool fast,
                                       const Result& result);

}  // namespace minifloat::torch_ops
