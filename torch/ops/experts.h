// The copies between tokens and the rows of experts.
#pragma once

#include <optional>

#include "ops/ops.h"

namespace minifloat::torch_ops {

// Requires a base of the sums of slots: float32 of their shape, on their device.
void check_base(const char* op, const Tensor& base, c10::SymIntArrayRef shape, at::Device device);

// The ops of these names, through the dispatcher. Differentiable.
Tensor take_rows(const Tensor& x, const Tensor& index, const c10::SymInt& slots,
                 const std::optional<Tensor>& places);
Tensor add_slots(const Tensor& rows, const Tensor& places, const std::optional<Tensor>& base,
                 const std::optional<Tensor>& pairs = std::nullopt);

}  // namespace minifloat::torch_ops
