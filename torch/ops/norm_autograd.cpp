// The derivatives of the ops of normalisations, and the op deferred_norm: the history of a result
// that nothing reads as values.
//
//     norm                 y
//     deferred_norm        zeros of y's shape without memory: linear layers that take y's codes
//                          send the gradients of y to it
//
// Backward is differentiable, and saves x, weight and bias alone.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/norm.h"
#include "ops/tangents.h"

namespace minifloat {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch_ops::NormArguments;
using torch_ops::NormGradients;
using torch_ops::NormNeeds;
using MaybeTensor = std::optional<Tensor>;

template <class Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

Tensor call_norm(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                 const std::string& kind, double eps) {
  static const auto op = find<Tensor(const Tensor&, const MaybeTensor&, const MaybeTensor&,
                                     const std::string&, double)>("minifloat::norm");
  return op.call(x, weight, bias, kind, eps);
}

bool requires_grad(const MaybeTensor& t) { return t && t->defined() && t->requires_grad(); }
// Returns whether a result has a history.
bool has_history(const NormArguments& a) {
  return at::GradMode::is_enabled() &&
         (a.x.requires_grad() || requires_grad(a.weight) || requires_grad(a.bias));
}

void check_no_tangents(const NormArguments& a) {
  const auto check = [&](const char* name, const Tensor& t) {
    TORCH_CHECK_NOT_IMPLEMENTED(!t.defined() || !t._fw_grad(/*level=*/0).defined(), a.op,
                                ": expected ", name,
                                " without a tangent, got one: use reverse mode");
  };
  check("x", a.x);
  if (a.weight) check("weight", *a.weight);
  if (a.bias) check("bias", *a.bias);
}

// ---- What backward reads ------------------------------------------------------------------------
void save(AutogradContext* ctx, const NormArguments& a) {
  ctx->save_for_backward({a.x, a.weight.value_or(Tensor()), a.bias.value_or(Tensor())});
  ctx->saved_data["kind"] = static_cast<std::int64_t>(torch_ops::check_norm(a));
  ctx->saved_data["eps"] = a.eps;
  ctx->saved_data["needs_x"] = a.x.requires_grad();
  ctx->saved_data["needs_weight"] = requires_grad(a.weight);
  ctx->saved_data["needs_bias"] = requires_grad(a.bias);
}
NormGradients backward_of(AutogradContext* ctx, const Tensor& grad) {
  const variable_list saved = ctx->get_saved_variables();
  const NormNeeds needs = {ctx->saved_data["needs_x"].toBool(),
                           ctx->saved_data["needs_weight"].toBool(),
                           ctx->saved_data["needs_bias"].toBool()};
  return torch_ops::norm_backward(grad, saved[0], saved[1], saved[2],
                                  static_cast<NormKind>(ctx->saved_data["kind"].toInt()),
                                  ctx->saved_data["eps"].toDouble(), needs);
}

// Returns zeros of the shape and dtype of x, without memory for each.
Tensor zeros_without_memory(const Tensor& x) {
  return at::zeros({}, x.options()).expand_symint(x.sym_sizes());
}

template <bool kIsDeferred>
struct NormFunction : torch::autograd::Function<NormFunction<kIsDeferred>> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const MaybeTensor& weight,
                        const MaybeTensor& bias, const std::string& kind, double eps) {
    const at::AutoDispatchBelowADInplaceOrView below;
    save(ctx, {kIsDeferred ? "deferred_norm" : "norm", x, weight, bias, kind, eps});
    if constexpr (kIsDeferred) return zeros_without_memory(x);
    return call_norm(x, weight, bias, kind, eps);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const NormGradients d = backward_of(ctx, grads[0]);
    return {d.x, d.weight, d.bias, Tensor(), Tensor()};
  }
};

// ---- Kernels ------------------------------------------------------------------------------------
Tensor norm_autograd(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                     const std::string& kind, double eps) {
  const NormArguments a = {"norm", x, weight, bias, kind, eps};
  torch_ops::check_norm(a);
  check_no_tangents(a);
  if (has_history(a)) return NormFunction<false>::apply(x, weight, bias, kind, eps);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_norm(x, weight, bias, kind, eps);
}

Tensor deferred_norm_kernel(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                            const std::string& kind, double eps) {
  const NormArguments a = {"deferred_norm", x, weight, bias, kind, eps};
  torch_ops::check_norm(a);
  check_no_tangents(a);
  return has_history(a) ? NormFunction<true>::apply(x, weight, bias, kind, eps)
                        : zeros_without_memory(x);
}

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, CompositeImplicitAutograd, m) {
  m.impl("deferred_norm", deferred_norm_kernel);
}

TORCH_LIBRARY_IMPL(minifloat, Autograd, m) {
  m.impl("norm", norm_autograd);
  m.impl("quantize_norm", torch_ops::without_derivative());
}

}  // namespace minifloat
