// The ops activation and activation_backward, between dense layers, and swiglu and swiglu_backward,
// between the products of experts: one computation, of which each op takes the arguments that it
// has. activation_casts.cpp and activation_gradients.cpp have the casts; experts_autograd.cpp
// differentiates swiglu.
#include "ops/activation.h"

#include <ATen/ATen.h>

#include <tuple>
#include <vector>

#include "minifloat/experts.h"
#include "ops/activation_inputs.h"
#include "ops/bridge.h"
#include "ops/op.h"
#include "ops/outputs.h"

namespace minifloat {
namespace {

using at::Tensor;
using c10::SymInt;
using torch_ops::ActivationArguments;
using torch_ops::ActivationGradients;
using torch_ops::ActivationInputs;
using torch_ops::no_values;
using torch_ops::uninitialized_like;
using MaybeTensor = std::optional<Tensor>;

Tensor values_of(const ActivationArguments& a) {
  torch_ops::check_activation(a, nullptr, false);
  const Tensor h = a.weights ? torch_ops::empty(a.gate, {a.rows(), a.width()}, a.gate.scalar_type())
                             : uninitialized_like(a.gate);
  if (h.is_meta()) return h;
  const ActivationInputs in = torch_ops::inputs_of(a);
  bridge::with_value_errors(
      [&] { swiglu(in.of, h.mutable_data_ptr(), bridge::ExecutionOn(a.gate)); });
  return h;
}

// ---- Gradients ----------------------------------------------------------------------------------
ActivationGradients empty_gradients(const ActivationArguments& a, bool amaxes) {
  TORCH_CHECK_VALUE(!amaxes || a.groups, a.op, ": expected groups with amaxes, got none");
  ActivationGradients out = {uninitialized_like(a.gate),
                             a.up ? uninitialized_like(*a.up) : no_values(a.gate),
                             a.weights ? uninitialized_like(*a.weights) : Tensor()};
  const auto add_amaxes = [&](const Tensor& t) {
    const SymInt groups = a.groups->sym_size(1) - 1;
    out.amaxes.push_back(torch_ops::empty(t, {t.sym_size(0)}, at::kFloat));
    out.amaxes.push_back(torch_ops::empty(t, {groups, t.sym_size(1)}, at::kFloat));
  };
  if (amaxes) add_amaxes(a.gate);
  if (amaxes && a.up) add_amaxes(*a.up);
  return out;
}

void compute_gradients(const ActivationArguments& a, const Tensor& dh,
                       const ActivationGradients& out) {
  const ActivationInputs in = torch_ops::inputs_of(a, &dh);
  SwiGluGradients to;
  to.dh = in.dh.const_data_ptr();
  to.dh_stride = in.dh.stride(0);
  to.gate = out.gate.mutable_data_ptr();
  if (a.up)
    to.up = out.up.mutable_data_ptr();
  else if (a.is_joint())
    to.up = static_cast<char*>(to.gate) + in.up_at() * a.gate.element_size();
  to.stride = in.gate.size(1);
  if (a.weights) to.weights = out.weights.mutable_data_ptr<float>();
  const auto amaxes_at = [&](std::size_t i) -> LineAmaxes {
    return {out.amaxes[i].mutable_data_ptr<float>(), out.amaxes[i + 1].mutable_data_ptr<float>()};
  };
  if (!out.amaxes.empty()) to.of_gate = amaxes_at(0);
  if (out.amaxes.size() > 2) to.of_up = amaxes_at(2);
  bridge::with_value_errors([&] { swiglu_backward(in.of, to, bridge::ExecutionOn(a.gate)); });
}

ActivationGradients gradients_of(const Tensor& dh, const ActivationArguments& a, bool amaxes) {
  torch_ops::check_activation(a, &dh, false);
  ActivationGradients out = empty_gradients(a, amaxes);
  if (!out.gate.is_meta()) compute_gradients(a, dh, out);
  return out;
}

// ---- The ops ------------------------------------------------------------------------------------
Tensor activation_kernel(const Tensor& gate, const MaybeTensor& up, const std::string& activation) {
  return values_of({.op = "activation", .gate = gate, .up = up, .activation = activation});
}

std::tuple<Tensor, Tensor> activation_backward_kernel(const Tensor& dh, const Tensor& gate,
                                                      const MaybeTensor& up,
                                                      const std::string& activation) {
  ActivationGradients d = gradients_of(
      dh, {.op = "activation_backward", .gate = gate, .up = up, .activation = activation}, false);
  return {std::move(d.gate), std::move(d.up)};
}

Tensor swiglu_kernel(const Tensor& product, const MaybeTensor& other, const Tensor& weights,
                     std::optional<double> limit, double alpha, bool interleaved,
                     const MaybeTensor& pairs, const MaybeTensor& groups) {
  return values_of({"swiglu", product, other, &weights, limit, alpha, interleaved, pairs, groups});
}

std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>> swiglu_backward_kernel(
    const Tensor& dh, const Tensor& product, const MaybeTensor& other, const Tensor& weights,
    std::optional<double> limit, double alpha, bool interleaved, const MaybeTensor& pairs,
    const MaybeTensor& groups, bool amaxes) {
  ActivationGradients d = gradients_of(
      dh, {"swiglu_backward", product, other, &weights, limit, alpha, interleaved, pairs, groups},
      amaxes);
  return {std::move(d.gate), std::move(d.up), std::move(d.weights), std::move(d.amaxes)};
}

// A backward pass through these ops alone raises, except through swiglu.
const torch_ops::Op activation_op("activation", activation_kernel, torch_ops::refused());
const torch_ops::Op activation_backward_op("activation_backward", activation_backward_kernel,
                                           torch_ops::refused());
const torch_ops::Op swiglu_op("swiglu", swiglu_kernel);
const torch_ops::Op swiglu_backward_op("swiglu_backward", swiglu_backward_kernel,
                                       torch_ops::refused());

}  // namespace

namespace torch_ops {

Tensor activation(const ActivationArguments& of) {
  if (!of.weights) return activation_op(of.gate, of.up, of.activation);
  return swiglu_op(of.gate, of.up, *of.weights, of.limit, of.alpha, of.interleaved, of.pairs,
                   of.groups);
}

ActivationGradients activation_backward(const Tensor& dh, const ActivationArguments& of,
                                        bool amaxes) {
  ActivationGradients d;
  if (of.weights)
    std::tie(d.gate, d.up, d.weights, d.amaxes) =
        swiglu_backward_op(dh, of.gate, of.up, *of.weights, of.limit, of.alpha, of.interleaved,
                           of.pairs, of.groups, amaxes);
  else
    std::tie(d.gate, d.up) = activation_backward_op(dh, of.gate, of.up, of.activation);
  return d;
}

}  // namespace torch_ops

}  // namespace minifloat
