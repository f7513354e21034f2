// The rows of amax histories that casts read and raise. A history is (operands, 1 + length)
// float32, or of experts (operands, experts, 1 + length).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace minifloat::torch_ops {

using at::Tensor;

// The operands of a layer's three products, which are the rows of its history.
enum Place { kFpropX, kFpropW, kDgradG, kDgradW, kWgradG, kWgradX, kPlaces };

// The first columns of a history: the active amax, and the current amax of this step. Those of
// earlier steps follow.
enum HistoryColumn { kActive, kCurrent };

// Returns the active amax of an operand: a view of one entry, or of one for each expert.
Tensor active_amax(const Tensor& history, std::int64_t row);

}  // namespace minifloat::torch_ops
