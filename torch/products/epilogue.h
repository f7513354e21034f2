// The bias and the rounding of a product on CUDA whose engine does not do both.
#pragma once

#include "products/engines.h"

namespace minifloat::torch_ops {

// The bias and dtype that are passed to an engine. An engine that can add a bf16 bias before it
// rounds gets the bias. Another returns fp32 sums, for add_bias.
struct Request {
  std::optional<Tensor> bias;
  at::ScalarType dtype;
  bool is_whole;  // add_bias is not needed
};
// Returns what to pass. can_add: the engine can add a bf16 bias.
Request request_of(const Result& result, bool can_add);

// Returns sums (m, n) fp32 + bias, rounded once.
Tensor add_bias(const Tensor& sums, const Result& result);

}  // namespace minifloat::torch_ops
