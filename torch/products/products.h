// A product's operands once its arguments are checked, and the engines that take them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "products/block_scaled.h"
#include "products/engines.h"
#include "products/inputs.h"

namespace minifloat::torch_ops {

// One side of an exact product: values, and the factors still owed.
struct ExactSide {
  Tensor values;       // bf16 (rows, k), or the operand itself under bf16
  Tensor factor;       // fp32 (), of the whole operand; undefined: none
  Tensor row_factors;  // fp32 (rows), where a row scale is no power of two; undefined: none
};

// One side of a product of FP8 codes.
struct Fp8Side {
  const Spec& spec;
  const Tensor& codes;  // uint8 or float8_e4m3fn (rows, k)
  const Tensor& scale;  // fp32: one, (rows), or of blocks (rows / b, k / b)
};

// What is added to the product, and what it becomes.
struct Result {
  const std::optional<Tensor>& bias;  // (n)
  at::ScalarType dtype;               // float32 or bfloat16
};

// Whether both operands' values are bf16, so that an engine for bf16 multiplies them.
inline bool are_narrow(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == at::kBFloat16 && b.scalar_type() == at::kBFloat16;
}

// (m, k) · (n, k)ᵀ on the device of the operands.
Tensor exact_product_cpu(const ExactSide& a, const ExactSide& b, const Result& result);
Tensor exact_product_cuda(const ExactSide& a, const ExactSide& b, const Result& result);
Tensor fp8_product(Engine engine, const Fp8Side& a, const Fp8Side& b, bool fast,
                   const Result& result);
Tensor block_scaled_product(const BlockScaledSide& a, const BlockScaledSide& b,
                            const Result& result);

// Returns a · bᵀ over k, (m, n): by the planned engine, or the next best where that does not take the sizes. Through
// the dispatcher, or past it where all tensors are plain (ops/plain.h).
Tensor scaled_mm(const PlannedProduct& planned, const ProductInput& a, const ProductInput& b,
                 const c10::SymInt& k, const std::optional<Tensor>& bias, at::ScalarType out_dtype);

// Returns an operand as the planned engine reads it: work done once for an operand of several products. spec: its own
ProductInput prepare_input(const PlannedProduct& planned, const Spec& spec, ProductInput input,
                           const c10::SymInt& cols);

// What the product of an operand's code values and block scales is still to be multiplied by: fp32 (), on its device.
Tensor tensor_factor_of(const Spec& spec, const Tensor& scale, const Tensor& amax);

}  // namespace minifloat::torch_ops
