// What ops that write do with views that negate or conjugate. Before a write to one, torch's
// fallback copies it, and expects that the op returns what it wrote. These ops do not. So they
// refuse to write to such a view, and read the values of others. Ops that write to lists are
// refused by torch, composite ones call these.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cstddef>
#include <vector>

namespace minifloat {
namespace {

template <c10::DispatchKey kKey>
void resolve_views(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) {
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = torch::jit::peek(*stack, i, arguments.size());
    if (!value.isTensor()) continue;
    const at::Tensor& t = value.toTensor();
    if (!t.defined() || !(t.is_neg() || t.is_conj())) continue;
    const c10::AliasInfo* alias = arguments[i].alias_info();
    TORCH_CHECK_VALUE(!alias || !alias->isWrite(), op.schema().name(), ": expected ",
                      arguments[i].name(),
                      " with its values in memory, got a view that negates or conjugates them");
    value = t.resolve_conj().resolve_neg();
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

template <c10::DispatchKey kKey>
void register_views(torch::Library& m) {
  for (const char* op :
       {"quantize_delayed", "add_scaled_mm", "sum_messages", "activation_gradients_",
        "advance_random_state", "linear_forward_delayed", "linear_backward_delayed"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&resolve_views<kKey>>());
}

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, Negative, m) { register_views<c10::DispatchKey::Negative>(m); }
TORCH_LIBRARY_IMPL(minifloat, Conjugate, m) { register_views<c10::DispatchKey::Conjugate>(m); }

}  // namespace minifloat
