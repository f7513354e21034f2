// Current amaxes that a layer raises in its history (ops/history.h) after its casts: those that no
// cast raises itself.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace minifloat::torch_ops {

using at::Tensor;

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
