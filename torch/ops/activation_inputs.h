// Checks and kernel inputs that the ops of activations share.
#pragma once

#include <ATen/core/Tensor.h>

#include "minifloat/experts.h"
#include "ops/activation.h"

namespace minifloat::torch_ops {

// Raises ValueError for arguments that an op of activations does not take.
//   dh: null: the op takes none; is_matrix: gate must have two dimensions, as that of experts
void check_activation(const ActivationArguments& of, const Tensor* dh, bool is_matrix);

// The inputs as matrices, and the arguments of the kernels, which point into them.
struct ActivationInputs {
  Tensor gate, up, dh, weights, pairs;
  SwiGlu of;

  // Returns where up begins in one matrix with gate, or up's gradient with gate's: elements.
  std::int64_t up_at() const { return of.is_interleaved ? 1 : of.width; }
};
ActivationInputs inputs_of(const ActivationArguments& a, const Tensor* dh = nullptr);

// Requires options of a cast that is not asked for on the device of `like`, within their memory.
void check_unread(const char* op, const QuantizeOptions& options, const Tensor& like);

// Returns uninitialized memory of t's shape and dtype.
Tensor uninitialized_like(const Tensor& t);
// Returns an empty tensor of t's dtype.
Tensor no_values(const Tensor& t);

}  // namespace minifloat::torch_ops
