// When a layer may call kernels without torch's dispatcher, and memory and views without it;
// ops/kernels.h has the calls. A dispatch costs about as much as the launch of a small kernel, and
// a layer needs dozens. So ops that a layer calls skip the dispatcher where nothing can intercept
// them, and their outputs share one allocation.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <optional>

namespace minifloat::torch_ops {

using at::Tensor;

// Whether the dispatcher would call nothing except the CPU's or CUDA's kernel for these tensors: no
// tensor is a subclass with a dispatch of its own, and no mode, transform, trace or profiler is
// active. Undefined tensors and null pointers are absent arguments.
bool can_skip_dispatcher(std::initializer_list<const Tensor*> tensors);

// Returns the address of an optional argument, or null where it is absent.
inline const Tensor* or_null(const std::optional<Tensor>& t) { return t ? &*t : nullptr; }

// The functions below are for tensors with real memory: in kernels, or after can_skip_dispatcher.

// Returns uninitialized memory on the device of `like`.
Tensor direct_empty(const Tensor& like, at::IntArrayRef sizes, at::ScalarType dtype);

// Returns a view of t's storage under another dtype or shape. The view has no autograd history and
// does not share t's version counter. offset: in elements of `dtype`, from the storage's beginning.
Tensor direct_view(const Tensor& t, at::ScalarType dtype, at::IntArrayRef sizes,
                   at::IntArrayRef strides, std::int64_t offset);
Tensor direct_view(const Tensor& t, at::ScalarType dtype, at::IntArrayRef sizes,
                   std::int64_t offset);  // contiguous
// Views all of a contiguous t.
Tensor direct_view(const Tensor& t, at::ScalarType dtype, at::IntArrayRef sizes);
// Returns a view of the transpose.
Tensor direct_transpose(const Tensor& matrix);

// Makes `view` share the version counter of `base`, whose memory it views, as torch's own views do.
// Autograd then raises in a backward pass that would read overwritten values. Does nothing where
// the tensors are the same, share no memory, are inference tensors, or of a trace or subclass.
void share_version(const Tensor& view, const Tensor& base);

// Returns t.to(dtype), without a call where t has that dtype.
inline Tensor to_dtype(const Tensor& t, at::ScalarType dtype) {
  return t.scalar_type() == dtype ? t : t.to(dtype);
}

}  // namespace minifloat::torch_ops
