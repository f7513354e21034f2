// The ranks that hold shards of the same weights: the all-reduce between them, and the proof that they mean the same.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>
#include <vector>

#include "minifloat/partial_cast.h"

namespace minifloat::torch_ops {

using Ranks = c10::intrusive_ptr<c10d::ProcessGroup>;

// The group that torch.distributed knows by this name; null for "": one process alone.
Ranks resolve_ranks(const std::string& group);

// In place, MAX, in the order of the current stream.
void all_reduce_max(const Ranks& ranks, const at::Tensor& t);

// ValueError on every rank, naming the weight, where ranks differ in a weight's name, shape, specs or dtype, or where
// all their shards are not the whole of it. Asks the others once for every list of weights: the first step.
void require_agreement(const Ranks& ranks, const std::vector<PartialCast>& casts,
                       const std::vector<std::string>& names, const at::Tensor& like);

}  // namespace minifloat::torch_ops
