// The ranks that hold shards of the same weights, and the all-reduce between them.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace minifloat::torch_ops {

using Ranks = c10::intrusive_ptr<c10d::ProcessGroup>;

// Reduces t in place, in the order of the current stream. what: a name of t's numbers for the error
// that a lost or blocked rank causes
void all_reduce(const Ranks& ranks, const at::Tensor& t, c10d::ReduceOp::RedOpType op,
                const char* what);

}  // namespace minifloat::torch_ops
