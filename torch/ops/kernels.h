// Kernels of the ops that layers call, for tensors that can skip the dispatcher (direct.h). Outputs
// that the caller does not request are undefined. The outputs of a direction share one allocation.
#pragma once

#include <functional>

#include "minifloat/quantize.h"
#include "ops/ops.h"

namespace minifloat::torch_ops {

// Casts values that a kernel computes, which lie in groups or not; null: without that direction.
using CastOfComputed = std::function<void(const Operand* row, const Operand* col,
                                          const GroupTable& groups, const Execution& execution)>;

// The cast of ops/quantize.cpp.
// of: casts the values, whose shape, dtype and device x has; null: x has the values.
// shares_memory: else outputs are those of an op, whose absent ones are empty; so are those on Meta
Directions direct_quantize(const Tensor& x, const std::string& row, const std::string& col,
                           const QuantizeOptions& options, const CastOfComputed* of = nullptr,
                           bool shares_memory = true);
// The op quantize_delayed, through the dispatcher.
Directions quantize_by_history(const Tensor& x, const std::string& row, const std::string& col,
                               const QuantizeOptions& options);
Tensor direct_decode(const Tensor& codes, const Tensor& scale, const Spec& spec, std::int64_t cols,
                     const Groups& groups);

// Codes of FP4 values under power-of-two scales, and what fp4_as_fp8 makes of them.
struct Fp4Operand {
  const Spec& spec;
  const Tensor &codes, &scale, &amax;
  Groups groups = {};
};
using Fp8Rows = std::pair<Tensor, Tensor>;  // codes and row scales
Fp8Rows direct_fp4_as_fp8(const Fp4Operand& operand, std::int64_t cols);
// Both operands of a product, in one launch.
std::pair<Fp8Rows, Fp8Rows> direct_fp4_as_fp8(const Fp4Operand& a, const Fp4Operand& b,
                                              std::int64_t cols);

}  // namespace minifloat::torch_ops
