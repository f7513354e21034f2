#include "ops/direct.h"

#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace minifloat::torch_ops {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// The dispatch keys of a tensor without subclass or transform. Autocast keys are in every key set,
// and are active only under autocast, which the ops of layers handle before they call other ops.
constexpr DispatchKeySet kDeviceKeys = DispatchKeySet(
    {DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::ADInplaceOrView, DispatchKey::AutogradCPU,
     DispatchKey::AutogradCUDA, DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA});

bool has_device_keys_alone(const Tensor& t) {
  const DispatchKeySet others =
      DispatchKeySet(DispatchKeySet::RAW, t.key_set().raw_repr() & ~kDeviceKeys.raw_repr());
  return others.empty();
}

Tensor view_of(const Tensor& t, at::ScalarType dtype, std::int64_t offset) {
  Tensor out =
      at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(t.storage()),
                                               t.key_set(), c10::scalarTypeToTypeMeta(dtype));
  out.unsafeGetTensorImpl()->set_storage_offset(offset);
  return out;
}

// Returns the storage offset of t, counted in elements of another dtype.
std::int64_t offset_in(const Tensor& t, at::ScalarType dtype) {
  return t.storage_offset() * static_cast<std::int64_t>(t.element_size()) /
         static_cast<std::int64_t>(c10::elementSize(dtype));
}

}  // namespace

bool can_skip_dispatcher(std::initializer_list<const Tensor*> tensors) {
  const DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  if ((included.raw_repr() & ~c10::default_included_set.raw_repr()) != 0) return false;
  for (const Tensor* t : tensors)
    if (t && t->defined() && !has_device_keys_alone(*t)) return false;
  return !at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
}

Tensor direct_empty(const Tensor& like, at::IntArrayRef sizes, at::ScalarType dtype) {
  if (like.is_cpu())
    return at::detail::empty_generic(sizes, c10::GetCPUAllocator(),
                                     DispatchKeySet(DispatchKey::CPU), dtype, std::nullopt);
  const c10::DeviceGuard here(like.device());  // the allocator uses the current device
  return at::detail::empty_generic(sizes, at::detail::getCUDAHooks().getCUDADeviceAllocator(),
                                   DispatchKeySet(DispatchKey::CUDA), dtype, std::nullopt);
}

Tensor direct_view(const Tensor& t, at::ScalarType dtype, at::IntArrayRef sizes,
                   at::IntArrayRef strides, std::int64_t offset) {
  Tensor out = view_of(t, dtype, offset);
  out.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return out;
}

Tensor direct_view(const Tensor& t, at::ScalarType dtype, at::IntArrayRef sizes,
                   std::int64_t offset) {
  Tensor out = view_of(t, dtype, offset);
  out.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return out;
}

Tensor direct_view(const Tensor& t, at::ScalarType dtype, at::IntArrayRef sizes) {
  return direct_view(t, dtype, sizes, offset_in(t, dtype));
}

Tensor direct_transpose(const Tensor& matrix) {
  const std::int64_t sizes[] = {matrix.size(1), matrix.size(0)};
  const std::int64_t strides[] = {matrix.stride(1), matrix.stride(0)};
  return direct_view(matrix, matrix.scalar_type(), sizes, strides, matrix.storage_offset());
}

void share_version(const Tensor& view, const Tensor& base) {
  if (view.is_same(base) || !has_device_keys_alone(view) || !has_device_keys_alone(base)) return;
  if (!view.is_alias_of(base)) return;
  if (!base.is_inference())
    view.unsafeGetTensorImpl()->set_version_counter(base.unsafeGetTensorImpl()->version_counter());
}

}  // namespace minifloat::torch_ops
