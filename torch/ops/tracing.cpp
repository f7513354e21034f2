#include "ops/tracing.h"

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace minifloat::torch_ops {

using c10::DispatchKey;
using c10::impl::TorchDispatchModeTLS;

bool is_compiled(const Tensor& t) {
  // Of the tensors of torch.func, which the ops within a layer have rules for.
  constexpr c10::DispatchKeySet kFunctionTransforms(
      {DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper});
  const auto mode = TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::FUNCTIONAL);
  return mode.has_value() && !t.key_set().has_any(kFunctionTransforms);
}

bool is_checkpointed(const Tensor& t) {
  return is_compiled(t) && TorchDispatchModeTLS::any_modes_set(/*skip_infra_modes=*/true);
}

}  // namespace minifloat::torch_ops
