// Kernels of the ops that layers call, for tensors that can skip the dispatcher (direct.h). Outputs
// that the caller does not request are undefined. The outputs of a direction share one allocation.
#pragma once

#include "ops/ops.h"

namespace minifloat::torch_ops {

std::pair<QuantizedOperand, QuantizedOperand> direct_quantize(const Tensor& x,
                                                              const std::string& row,
                                                              const std::string& col,
                                                              const QuantizeOptions& options);
Tensor direct_decode(const Tensor& codes, const Tensor& scale, const Spec& spec, std::int64_t cols);
std::pair<Tensor, Tensor> direct_fp4_as_fp8(const Tensor& codes, const Tensor& scale,
                                            const Tensor& amax, const Spec& spec,
                                            std::int64_t cols);

}  // namespace minifloat::torch_ops
