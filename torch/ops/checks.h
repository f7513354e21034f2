// Checks of the arguments of ops. Most compare sizes, dtypes and devices, and cost nanoseconds.
// check_memory also gathers a weight whose memory FSDP2 has freed. A failed check raises
// ValueError.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>

#include <initializer_list>

#include "minifloat/core/block.h"

namespace minifloat::bridge {

// Requires t on the device of `like`, unless t is undefined or empty.
inline void check_same_device(const char* op, const char* name, const at::Tensor& t,
                              const at::Tensor& like) {
  TORCH_CHECK_VALUE(!t.defined() || t.device() == like.device() || t.sym_numel() == 0, op,
                    ": expected ", name, " on ", like.device(), ", got ", t.device());
}
inline void check_same_device(const char* op, const char* name, at::TensorList list,
                              const at::Tensor& like) {
  for (const at::Tensor& t : list) check_same_device(op, name, t, like);
}

// Requires all tensors on one device. Ops that write to their arguments check this on meta tensors
// too.
inline void check_one_device(const char* op, std::initializer_list<at::TensorList> lists) {
  const at::Tensor* first = nullptr;
  for (const at::TensorList& list : lists)
    for (const at::Tensor& t : list) {
      if (!first) first = &t;
      check_same_device(op, "all tensors", t, *first);
    }
}

// Requires a number of elements from 0 to 2^48. A symbolic number passes: the kernel checks it.
inline void check_size(const char* op, const char* name, const c10::SymInt& n) {
  const auto size = n.maybe_as_int();
  TORCH_CHECK_VALUE(!size || is_addressable({*size}), op, ": expected ", name, " from 0 to 2^48, ",
                    "got ", n);
}

// Requires sizes whose products do not overflow, also where a size is 0.
inline void check_sizes(const char* op, const char* name, const at::Tensor& t) {
  if (t.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return;
  TORCH_CHECK_VALUE(is_addressable(t.sizes()), op, ": expected ", name,
                    " of at most 2^48 elements, got sizes ", t.sizes());
}

// Gathers a sharded weight whose freed memory backward reads, on all ranks. Does nothing for any
// other tensor. distributed/fsdp/recomputed.py defines the op that this calls.
void gather_memory(const at::Tensor& t);

// Requires real memory, on the CPU or CUDA, that holds every element. FSDP frees the storage of a
// weight between its gathers, while the tensor object stays.
inline void check_memory(const char* op, const char* name, const at::Tensor& t) {
  if (!t.defined()) return;
  TORCH_CHECK_VALUE((t.is_cpu() || t.is_cuda()) && t.layout() == at::kStrided && t.has_storage(),
                    op, ": expected ", name, " as a dense tensor on the CPU or CUDA, got ",
                    t.layout(), " on ", t.device());
  check_sizes(op, name, t);
  if (t.numel() == 0) return;
  std::int64_t last = t.storage_offset();
  for (std::int64_t dim = 0; dim < t.dim(); ++dim) last += (t.size(dim) - 1) * t.stride(dim);
  const std::int64_t needed = (last + 1) * static_cast<std::int64_t>(t.element_size());
  const auto held = [&t] { return static_cast<std::int64_t>(t.storage().nbytes()); };
  if (held() == 0) gather_memory(t);
  TORCH_CHECK_VALUE(needed <= held() && t.storage().data() != nullptr, op, ": expected ", name,
                    " in memory, ", needed, " bytes of its storage, got ", held(),
                    ": its storage is too small, or its memory is freed: no gather has brought it");
}

// Returns whether the tensor has memory of its own: it is of no trace and no subclass.
inline bool is_real(const at::Tensor& t) {
  constexpr c10::DispatchKeySet kTracedKeys(
      {c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
       c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
       c10::DispatchKey::ZeroTensor});
  return (t.is_cpu() || t.is_cuda()) && !t.key_set().has_any(kTracedKeys);
}

// Calls check_memory for a real tensor. The kernel that is called with real tensors checks others.
inline void check_memory_if_real(const char* op, const char* name, const at::Tensor& t) {
  if (is_real(t)) check_memory(op, name, t);
}

// Requires contiguous memory of `bytes` bytes.
inline void check_bytes(const char* op, const char* name, const at::Tensor& t, std::int64_t bytes) {
  check_memory(op, name, t);
  TORCH_CHECK_VALUE(t.is_contiguous() && static_cast<std::int64_t>(t.nbytes()) == bytes, op,
                    ": expected ", bytes, " contiguous bytes of ", name, ", got ", t.nbytes(),
                    " with strides ", t.strides());
}

inline bool is_value_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16;
}

// Requires a tensor of values: fp32 or bf16.
inline void check_value_dtype(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(is_value_dtype(t.scalar_type()), op, ": expected ", name,
                    " in float32 or bfloat16, got ", t.scalar_type());
}

// Requires x as values, (rows, cols) or (batch, rows, cols).
inline void check_values(const char* op, const at::Tensor& x) {
  check_value_dtype(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() == 2 || x.dim() == 3, op,
                    ": expected x of shape (rows, cols) or (batch, rows, cols), got ", x.dim(),
                    " dimensions");
  check_sizes(op, "x", x);
}

// Requires the state of stochastic rounding, on x's device.
inline void check_rng(const char* op, const at::Tensor& rng, const at::Tensor& x) {
  TORCH_CHECK_VALUE(rng.scalar_type() == at::kLong && rng.dim() == 1 &&
                        (rng.sym_size(0) == 2 || rng.sym_size(0) == 3),
                    op, ": expected rng as int64 (2) or (3), got ", rng.scalar_type(), " ",
                    rng.sym_sizes());
  TORCH_CHECK_VALUE(rng.device() == x.device(), op, ": expected rng on ", x.device(), ", got ",
                    rng.device());
}

}  // namespace minifloat::bridge
