// What ops require of tensors and numbers before they read or write anything: each check once, for every op. Sizes,
// dtypes and devices alone, so that a check costs nanoseconds. A failed one raises ValueError.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>

#include <initializer_list>

#include "minifloat/core/block.h"

namespace minifloat::bridge {

// The tensors of one call lie on one device; an undefined or empty one lies anywhere.
inline void check_same_device(const char* op, const char* name, const at::Tensor& t,
                              const at::Tensor& like) {
  TORCH_CHECK_VALUE(!t.defined() || t.device() == like.device() || t.sym_numel() == 0, op,
                    ": expected ", name, " on ", like.device(), ", got ", t.device());
}
inline void check_same_device(const char* op, const char* name, at::TensorList list,
                              const at::Tensor& like) {
  for (const at::Tensor& t : list) check_same_device(op, name, t, like);
}

// Requires one device of an op that writes to its arguments; the check that their kernels on meta tensors make.
inline void check_one_device(const char* op, std::initializer_list<at::TensorList> lists) {
  const at::Tensor* first = nullptr;
  for (const at::TensorList& list : lists)
    for (const at::Tensor& t : list) {
      if (!first) first = &t;
      check_same_device(op, "all tensors", t, *first);
    }
}

// A number of elements; a symbolic one is checked where it is a number.
inline void check_size(const char* op, const char* name, const c10::SymInt& n) {
  const auto size = n.maybe_as_int();
  TORCH_CHECK_VALUE(!size || is_addressable({*size}), op, ": expected ", name, " from 0 to 2^48, ",
                    "got ", n);
}

// Sizes whose products do not overflow, also where one of them is 0.
inline void check_sizes(const char* op, const char* name, const at::Tensor& t) {
  if (t.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return;
  TORCH_CHECK_VALUE(is_addressable(t.sizes()), op, ": expected ", name,
                    " of at most 2^48 elements, got sizes ", t.sizes());
}

// Real memory, on the CPU or CUDA, that holds every element. Sharding frees what is not gathered and leaves the tensors,
// and a storage can be resized below its tensors.
inline void check_memory(const char* op, const char* name, const at::Tensor& t) {
  if (!t.defined()) return;
  TORCH_CHECK_VALUE((t.is_cpu() || t.is_cuda()) && t.layout() == at::kStrided && t.has_storage(),
                    op, ": expected ", name, " as a dense tensor on the CPU or CUDA, got ",
                    t.layout(), " on ", t.device());
  check_sizes(op, name, t);
  if (t.numel() == 0) return;
  std::int64_t last = t.storage_offset();
  for (std::int64_t dim = 0; dim < t.dim(); ++dim) last += (t.size(dim) - 1) * t.stride(dim);
  const std::int64_t needed = (last + 1) * static_cast<std::int64_t>(t.element_size()),
                     held = static_cast<std::int64_t>(t.storage().nbytes());
  TORCH_CHECK_VALUE(needed <= held && t.storage().data() != nullptr, op, ": expected ", name,
                    " in memory, ", needed, " bytes of its storage, got ", held,
                    ": its storage is too small, or its memory is freed: no gather has brought it");
}

// The same of a tensor that a trace or a subclass may stand for: their kernels check what they are called with.
inline void check_memory_if_real(const char* op, const char* name, const at::Tensor& t) {
  constexpr c10::DispatchKeySet kStandIns(
      {c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
       c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
       c10::DispatchKey::ZeroTensor});
  if ((t.is_cpu() || t.is_cuda()) && !t.key_set().has_any(kStandIns)) check_memory(op, name, t);
}

// Memory of `bytes` bytes that is read or written as it lies.
inline void check_bytes(const char* op, const char* name, const at::Tensor& t, std::int64_t bytes) {
  check_memory(op, name, t);
  TORCH_CHECK_VALUE(t.is_contiguous() && static_cast<std::int64_t>(t.nbytes()) == bytes, op,
                    ": expected ", bytes, " contiguous bytes of ", name, ", got ", t.nbytes(),
                    " with strides ", t.strides());
}

inline bool is_value_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16;
}

// Values in high precision: what is read as numbers.
inline void check_value_dtype(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(is_value_dtype(t.scalar_type()), op, ": expected ", name,
                    " in float32 or bfloat16, got ", t.scalar_type());
}

// What every op that reads values requires of its input.
inline void check_values(const char* op, const at::Tensor& x) {
  check_value_dtype(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() == 2 || x.dim() == 3, op,
                    ": expected x of shape (rows, cols) or (batch, rows, cols), got ", x.dim(),
                    " dimensions");
  check_sizes(op, "x", x);
}

// The state of stochastic rounding.
inline void check_rng(const char* op, const at::Tensor& rng, const at::Tensor& x) {
  TORCH_CHECK_VALUE(rng.scalar_type() == at::kLong && rng.dim() == 1 &&
                        (rng.sym_size(0) == 2 || rng.sym_size(0) == 3),
                    op, ": expected rng as int64 (2) or (3), got ", rng.scalar_type(), " ",
                    rng.sym_sizes());
  TORCH_CHECK_VALUE(rng.device() == x.device(), op, ": expected rng on ", x.device(), ", got ",
                    rng.device());
}

}  // namespace minifloat::bridge
