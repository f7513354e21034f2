// The derivatives of the ops between the products of experts:
//
//     swiglu       h          backward: swiglu_backward, which has no derivative itself
//     take_rows    rows       backward: add_slots
//     add_slots    tokens     backward: take_rows
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <utility>

#include "ops/activation.h"
#include "ops/direct.h"
#include "ops/experts.h"
#include "ops/op.h"

namespace minifloat {
namespace {

using at::Tensor;
using c10::SymInt;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch_ops::ActivationArguments;
using torch_ops::ActivationGradients;
using MaybeTensor = std::optional<Tensor>;

// Returns whether a result of these tensors has a history, and raises for a tangent.
bool is_differentiated(const char* op, std::initializer_list<const Tensor*> tensors) {
  bool any = false;
  for (const Tensor* t : tensors) {
    if (!t || !t->defined()) continue;
    torch_ops::check_no_tangent(op, "values", *t);
    any |= t->requires_grad();
  }
  return any && at::GradMode::is_enabled();
}

MaybeTensor as_optional(const Tensor& t) { return t.defined() ? MaybeTensor(t) : std::nullopt; }

struct SwiGluFunction : torch::autograd::Function<SwiGluFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& product, const MaybeTensor& other,
                        const Tensor& weights, const ActivationArguments& a) {
    const at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({product, other.value_or(Tensor()), weights, a.pairs.value_or(Tensor()),
                            a.groups.value_or(Tensor())});
    ctx->saved_data["limit"] = a.limit;
    ctx->saved_data["alpha"] = a.alpha;
    ctx->saved_data["interleaved"] = a.interleaved;
    return torch_ops::activation(a);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const MaybeTensor other = as_optional(saved[1]), pairs = as_optional(saved[3]),
                      groups = as_optional(saved[4]);
    const ActivationGradients d = torch_ops::activation_backward(
        grads[0],
        {"swiglu", saved[0], other, &saved[2], ctx->saved_data["limit"].toOptional<double>(),
         ctx->saved_data["alpha"].toDouble(), ctx->saved_data["interleaved"].toBool(), pairs,
         groups});
    return {d.gate, other ? d.up : Tensor(), d.weights, Tensor()};
  }
};

struct TakeRowsFunction : torch::autograd::Function<TakeRowsFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& index,
                        const SymInt& slots, const MaybeTensor& places) {
    const at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({index, places.value_or(Tensor())});
    return torch_ops::take_rows(x, index, slots, places);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    TORCH_CHECK_VALUE(saved[1].defined(),
                      "take_rows: expected places, which the gradient of x reads, got none");
    return {torch_ops::add_slots(grads[0], saved[1], std::nullopt, saved[0]), Tensor(), Tensor(),
            Tensor()};
  }
};

struct AddSlotsFunction : torch::autograd::Function<AddSlotsFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& rows, const Tensor& places,
                        const MaybeTensor& base, const MaybeTensor& pairs) {
    const at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({places, pairs.value_or(Tensor())});
    ctx->saved_data["needs_rows"] = rows.requires_grad();
    ctx->saved_data["needs_base"] = base && base->requires_grad();
    return torch_ops::add_slots(rows, places, base, pairs);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    variable_list out(4);
    if (ctx->saved_data["needs_rows"].toBool()) {
      TORCH_CHECK_VALUE(saved[1].defined(),
                        "add_slots: expected pairs, which the gradient of rows reads, got none");
      const SymInt slots = saved[0].sym_size(1).max(1);
      out[0] = torch_ops::take_rows(grads[0], saved[1], slots, saved[0]);
    }
    if (ctx->saved_data["needs_base"].toBool()) out[2] = torch_ops::to_dtype(grads[0], at::kFloat);
    return out;
  }
};

Tensor swiglu_autograd(const Tensor& product, const MaybeTensor& other, const Tensor& weights,
                       std::optional<double> limit, double alpha, bool interleaved,
                       const MaybeTensor& pairs, const MaybeTensor& groups) {
  const ActivationArguments a = {"swiglu", product,     other, &weights, limit,
                                 alpha,    interleaved, pairs, groups};
  if (is_differentiated("swiglu", {&product, torch_ops::or_null(other), &weights}))
    return SwiGluFunction::apply(product, other, weights, a);
  const at::AutoDispatchBelowADInplaceOrView below;
  return torch_ops::activation(a);
}

Tensor take_rows_autograd(const Tensor& x, const Tensor& index, SymInt slots,
                          const MaybeTensor& places) {
  if (is_differentiated("take_rows", {&x})) return TakeRowsFunction::apply(x, index, slots, places);
  const at::AutoDispatchBelowADInplaceOrView below;
  return torch_ops::take_rows(x, index, slots, places);
}

Tensor add_slots_autograd(const Tensor& rows, const Tensor& places, const MaybeTensor& base,
                          const MaybeTensor& pairs) {
  if (is_differentiated("add_slots", {&rows, torch_ops::or_null(base)}))
    return AddSlotsFunction::apply(rows, places, base, pairs);
  const at::AutoDispatchBelowADInplaceOrView below;
  return torch_ops::add_slots(rows, places, base, pairs);
}

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, Autograd, m) {
  m.impl("swiglu", swiglu_autograd);
  m.impl("take_rows", take_rows_autograd);
  m.impl("add_slots", add_slots_autograd);
}

}  // namespace minifloat
