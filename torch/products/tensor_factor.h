// The tensor scale of an operand, which is a pending factor of its decoded values and of its
// block-scaled codes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>

#include "minifloat/spec.h"
#include "minifloat/tensor_ref.h"

namespace minifloat::torch_ops {

using at::Tensor;

// Requires the numbers that tensor_factor_of reads, one or one a group. name: of the operand, for
// the message.
void check_tensor_factor(const char* op, const char* name, const Spec& spec, const Tensor& scale,
                         const Tensor& amax, const c10::SymInt& count = 1);

// Returns the tensor scales under a spec with a tensor amax: fp32 (), or (groups), on the device of
// amax; under a spec with blocks and an amax of each row the rows' scales, shaped as amax.
Tensor tensor_factor_of(const Spec& spec, const Tensor& scale, const Tensor& amax);

// A tensor scale that is still to be computed, from the scale or the amax of an operand.
struct TensorFactor {
  const Spec* spec;  // has a tensor amax
  Tensor scale, amax;
};
inline Tensor tensor_factor_of(const TensorFactor& factor) {
  return tensor_factor_of(*factor.spec, factor.scale, factor.amax);
}

// Returns {0, the product of two tensor scales}: fp32 (2) on the device of `like`, written by one
// kernel. An absent one is 1.
Tensor product_factor_of(const std::optional<TensorFactor>& a, const std::optional<TensorFactor>& b,
                         const Tensor& like, const Execution& execution);

}  // namespace minifloat::torch_ops
