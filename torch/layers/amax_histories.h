// The amax history of a layer under delayed scaling: (operands, 1 + length) float32, a row an
// operand. Columns: the active amax, the current amax of this step, then those of earlier steps. Of
// experts: (operands, experts, 1 + length).
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace minifloat::torch_ops {

using at::Tensor;

// Returns the active amax of an operand: a view of one entry, or of one for each expert.
Tensor active_amax(const Tensor& history, int row);

// A current amax, for one row of a history or for two rows that share the amax.
struct PendingAmax {
  Tensor history;
  int first, last;
  Tensor amax;
};
// The amaxes of a forward pass, written at its end, where nothing can fail any more.
using PendingAmaxes = std::vector<PendingAmax>;
// Raises the current amaxes of the histories to the pending ones.
void record(const PendingAmaxes& pending);

}  // namespace minifloat::torch_ops
