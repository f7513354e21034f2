// The product of two quantized operands, as layers ask for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "products/engines.h"
#include "products/inputs.h"

namespace minifloat::torch_ops {

// Returns a · bᵀ over k, (m, n): by the planned engine, or the next one that takes the sizes.
// Through the dispatcher, or past it where all tensors are plain (ops/direct.h).
Tensor scaled_mm(const PlannedProduct& planned, const ProductInput& a, const ProductInput& b,
                 const c10::SymInt& k, const std::optional<Tensor>& bias, at::ScalarType out_dtype);

// Returns an operand as the planned engine reads it: work done once for an operand of several
// products. spec: its own
ProductInput prepare_input(const PlannedProduct& planned, const Spec& spec, ProductInput input,
                           const c10::SymInt& cols);

}  // namespace minifloat::torch_ops
