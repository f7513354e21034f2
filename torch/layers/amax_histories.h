// Raises histories (ops/history.h) to current amaxes that the cast itself does not raise:
// those that several layers share, of ranks, of values that a kernel computes, and of a caller's
// codes.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace minifloat::torch_ops {

using at::Tensor;

// A current amax, for one row of a history or for two rows that share the amax.
struct CurrentAmax {
  Tensor history;
  int first, last;
  Tensor amax;
};
using CurrentAmaxes = std::vector<CurrentAmax>;

// Raises the histories, in one launch where their memory is real.
void raise(const CurrentAmaxes& found);

}  // namespace minifloat::torch_ops
