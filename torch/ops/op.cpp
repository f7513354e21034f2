#include "ops/op.h"

#include <c10/core/DispatchKeySet.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

namespace minifloat::torch_ops {
namespace {

void check_and_redispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                          torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const std::size_t first = stack->size() - arguments.size();
  for (std::size_t i = 0; i < arguments.size(); ++i)
    if (const c10::IValue& value = (*stack)[first + i]; value.isTensor())
      check_no_tangent(op.schema().name().c_str(), arguments[i].name().c_str(), value.toTensor());
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

}  // namespace

void check_no_tangent(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !t.defined() || !t._fw_grad(/*level=*/0).defined(), op, ": expected ", name,
      " without a tangent, got one: forward-mode differentiation does not pass through a quantized "
      "product; use reverse mode, or leave the layer in high precision");
}

torch::CppFunction skipped() { return torch::CppFunction::makeFallthrough(); }

torch::CppFunction refused() { return torch::autograd::autogradNotImplementedFallback(); }

torch::CppFunction without_derivative() {
  return torch::CppFunction::makeFromBoxedFunction<&check_and_redispatch>();
}

}  // namespace minifloat::torch_ops
