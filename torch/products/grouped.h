// Shared parts of the engines that multiply operands with groups on CUDA. All read the table of
// groups, on the device: the host does not wait.
#pragma once

#include "products/engines.h"

namespace minifloat::torch_ops {

// Returns the groups' ends as torch's grouped products read them, int32 (groups): among rows, or
// among columns under a unit.
Tensor ends_of(const Groups& groups, std::int64_t unit);

// Returns the group of each of `rows` rows, int64 (rows); that of rows past the last end is the
// last.
Tensor group_of_rows(const Groups& groups, std::int64_t rows);

// Adds the bias of each row's group to sums (M, n), rounded to the result's dtype.
Tensor add_group_bias(const Tensor& sums, const Groups& groups, const Result& result);

}  // namespace minifloat::torch_ops
