// Eager calls on ordinary tensors, past the dispatcher. A hop through it costs about as much as a small kernel's
// launch, and a layer takes dozens: so the ops that a layer is made of call each other's kernels directly where nobody
// else is to see them, and outputs that nobody sees apart share one allocation.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>

namespace minifloat::torch_ops {

using at::Tensor;

// Whether a device's kernel alone sees an op on these tensors: of the CPU or of CUDA, no subclass that is dispatched on,
// and no mode, transform, trace or profiler at work. An undefined tensor, or null, stands for one that is not given.
bool can_skip_dispatcher(std::initializer_list<const Tensor*> tensors);

// The functions below are for real memory: for kernels, and for tensors that are plain.

// Memory without values, on the device of `like`.
Tensor direct_empty(const Tensor& like, at::IntArrayRef sizes, at::ScalarType dtype);

// Memory of t under another dtype or shape, which has no history and no part in t's. offset: elements of `dtype` from
// the beginning of t's storage.
Tensor direct_view(const Tensor& t, at::ScalarType dtype, at::IntArrayRef sizes,
                   at::IntArrayRef strides, std::int64_t offset);
Tensor direct_view(const Tensor& t, at::ScalarType dtype, at::IntArrayRef sizes,
                   std::int64_t offset);  // adjacent elements
// Where t, of adjacent elements, lies.
Tensor direct_view(const Tensor& t, at::ScalarType dtype, at::IntArrayRef sizes);
Tensor direct_transpose(const Tensor& matrix);

// Counts writes to `view` and to `base`, of whose memory it is a view, together, as torch's own views do: autograd
// then refuses a backward pass that would read what was overwritten. Leaves other tensors as they are.
void share_version(const Tensor& view, const Tensor& base);

// t.to(dtype), without asking where it has it.
inline Tensor to_dtype(const Tensor& t, at::ScalarType dtype) {
  return t.scalar_type() == dtype ? t : t.to(dtype);
}

}  // namespace minifloat::torch_ops
