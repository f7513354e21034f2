// The bias and the rounding of a product on CUDA, where its engine does not do them.
#pragma once

#include "products/engines.h"

namespace minifloat::torch_ops {

// What an engine is asked for. It adds a bf16 bias before it rounds, where it can. Else it returns fp32 sums, for
// add_bias.
struct Request {
  std::optional<Tensor> bias;
  at::ScalarType dtype;
  bool is_whole;  // nothing is left to do
};
Request request_of(const Result& result, bool can_add);

// sums (m, n) fp32 + bias, rounded once.
Tensor add_bias(const Tensor& sums, const Result& result);

}  // namespace minifloat::torch_ops
