// The kernels of the ops that layers are made of, past the dispatcher: for plain tensors (plain.h). What the caller did
// not ask for is undefined, and the outputs of a direction share one allocation.
#pragma once

#include "ops/ops.h"

namespace minifloat::torch_ops {

std::pair<QuantizedOperand, QuantizedOperand> plain_quantize(const Tensor& x,
                                                             const std::string& row,
                                                             const std::string& col,
                                                             const QuantizeOptions& options);
Tensor plain_decode(const Tensor& codes, const Tensor& scale, const std::string& spec,
                    std::int64_t cols);
std::pair<Tensor, Tensor> plain_carry(const Tensor& codes, const Tensor& scale, const Tensor& amax,
                                      const std::string& spec, std::int64_t cols);
Tensor plain_scaled_mm(const QuantizedOperand& a, const QuantizedOperand& b,
                       const std::string& product, std::int64_t k,
                       const std::optional<Tensor>& bias, at::ScalarType out_dtype);

}  // namespace minifloat::torch_ops
