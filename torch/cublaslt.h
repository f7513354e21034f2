// An exact product whose factor lies on the device, as one kernel of cuBLASLt, which ATen's products cannot be told.
#pragma once

#include <optional>

#include "products.h"

namespace minifloat::torch_ops {

// a · bᵀ, where a side owes a factor of the whole operand and neither owes one of its rows: values bf16 on CUDA,
// rows or columns adjacent; plus bias, of the result's dtype and only where that is bf16; rounded once. Nothing where
// this build has no cuBLASLt, or cuBLASLt no kernel for the sizes.
std::optional<Tensor> product_by_device_factor(const ExactSide& a, const ExactSide& b,
                                               const Result& result);

}  // namespace minifloat::torch_ops
