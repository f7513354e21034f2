#include "products/epilogue.h"

#include <ATen/ATen.h>

#include "ops/direct.h"

namespace minifloat::torch_ops {

Request request_of(const Result& result, bool can_add) {
  if (!result.bias) return {std::nullopt, result.dtype, true};
  if (can_add && result.dtype == at::kBFloat16)
    return {to_dtype(*result.bias, at::kBFloat16), result.dtype, true};
  return {std::nullopt, at::kFloat, false};
}

Tensor add_bias(const Tensor& sums, const Result& result) {
  if (result.dtype == at::kFloat) return sums.add(*result.bias);
  Tensor out = direct_empty(sums, sums.sizes(), result.dtype);
  return at::add_out(out, sums, to_dtype(*result.bias, result.dtype));
}

}  // namespace minifloat::torch_ops
