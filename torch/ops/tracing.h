// Whether torch.compile traces a call.
#pragma once

#include <ATen/core/Tensor.h>

namespace minifloat::torch_ops {

using at::Tensor;

// Whether AOTAutograd, which torch.compile calls, traces a call with t.
bool is_compiled(const Tensor& t);
// Whether it does so within a selective checkpoint, whose policy is a mode: backward computes the
// results of some ops again.
bool is_checkpointed(const Tensor& t);

}  // namespace minifloat::torch_ops
