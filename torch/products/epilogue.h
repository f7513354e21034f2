// The bias and the rounding of a product on CUDA, where its engine does not do them.
#pragma once

#include "products/engines.h"

namespace minifloat::torch_ops {

// The request to an engine: to add a bf16 bias before it rounds, where it can; else to return fp32
// sums, for add_bias.
struct Request {
  std::optional<Tensor> bias;
  at::ScalarType dtype;
  bool is_whole;  // nothing is left to do
};
Request request_of(const Result& result, bool can_add);

// Returns sums (m, n) fp32 + bias, rounded once.
Tensor add_bias(const Tensor& sums, const Result& result);

}  // namespace minifloat::torch_ops
