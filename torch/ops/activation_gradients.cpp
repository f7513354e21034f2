// The op activation_gradients_: the gradients of an activation as values, with the amaxes by which
// later casts scale them, and h cast columnwise. dh's memory receives the gradient of gate. A cast
// that computed the values itself would compute them twice: once for the amax, once for the codes.
#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include "minifloat/experts.h"
#include "ops/activation.h"
#include "ops/activation_inputs.h"
#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/kernels.h"
#include "ops/op.h"
#include "ops/outputs.h"

namespace minifloat {
namespace {

using at::Tensor;
using torch_ops::ActivationArguments;
using torch_ops::ActivationInputs;
using torch_ops::GradientValues;
using torch_ops::QuantizeOptions;
using MaybeTensor = std::optional<Tensor>;

constexpr const char* kActivationGradients = "activation_gradients_";

void check(const Tensor& dh, const ActivationArguments& a, const std::string& h_col,
           const QuantizeOptions& h) {
  torch_ops::check_activation(a, &dh, true);
  TORCH_CHECK_VALUE(at::has_internal_overlap(dh) != at::MemOverlap::Yes, a.op,
                    ": expected dh with memory for each element, got strides ", dh.sym_strides());
  if (h_col.empty()) torch_ops::check_unread(a.op, h, dh);
}

// Allocates d_up and the amaxes. Without up d_up is empty.
GradientValues allocate(const ActivationArguments& a) {
  GradientValues out;
  out.up = a.up ? torch_ops::uninitialized_like(a.gate) : torch_ops::no_values(a.gate);
  out.amaxes = torch_ops::empty(a.gate, {c10::SymInt(a.up ? 2 : 1)}, at::kFloat);
  return out;
}

// Computes the gradients, that of gate in the memory of dh. Copies a dh that is not contiguous.
//   shares_memory: as direct_quantize takes it
GradientValues compute(const Tensor& dh, const ActivationArguments& a, const std::string& h_col,
                       const QuantizeOptions& h, bool shares_memory) {
  check(dh, a, h_col, h);
  GradientValues out = allocate(a);
  const Tensor d_gate = dh.is_contiguous() ? dh : dh.contiguous();
  const ActivationInputs in = torch_ops::inputs_of(a, &d_gate);
  const auto run = [&](const Operand* col, const Execution& execution) {
    const SwiGluGradients to = {.dh = d_gate.const_data_ptr(),
                                .dh_stride = in.of.width,
                                .gate = d_gate.mutable_data_ptr(),
                                .up = a.up ? out.up.mutable_data_ptr() : nullptr,
                                .stride = in.of.width,
                                .weights = nullptr};
    swiglu_backward_with_amaxes(in.of, to, out.amaxes.mutable_data_ptr<float>(),
                                static_cast<int>(out.amaxes.numel()), col, execution);
  };
  if (h_col.empty()) {
    bridge::with_value_errors([&] { run(nullptr, bridge::ExecutionOn(dh)); });
  } else {
    const torch_ops::CastOfComputed cast = [&](const Operand*, const Operand* col,
                                               const GroupTable&,
                                               const Execution& execution) { run(col, execution); };
    out.h = torch_ops::direct_quantize(in.gate, "", h_col, h, &cast, shares_memory).second;
  }
  if (!d_gate.is_same(dh)) dh.copy_(d_gate);
  return out;
}

using SixTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

SixTensors activation_gradients_kernel(const Tensor& dh, const Tensor& gate, const MaybeTensor& up,
                                       const std::string& activation, const std::string& h_col,
                                       const MaybeTensor& h_amax, const MaybeTensor& h_rng,
                                       std::int64_t h_stream, bool decoded_h) {
  const ActivationArguments a = {
      .op = kActivationGradients, .gate = gate, .up = up, .activation = activation};
  const QuantizeOptions h = {.amax_row = {},
                             .amax_col = h_amax,
                             .rng = h_rng,
                             .stream_col = h_stream,
                             .decoded_col = decoded_h};
  GradientValues out;
  if (dh.is_meta()) {
    check(dh, a, h_col, h);
    out = allocate(a);
    if (!h_col.empty()) out.h = torch_ops::quantize(gate, "", h_col, h).second;
  } else {
    out = compute(dh, a, h_col, h, false);
    if (!dh.is_inference()) dh.unsafeGetTensorImpl()->bump_version();
  }
  const auto given = [&](const Tensor& t) { return torch_ops::or_empty(&t, gate); };
  return {out.up,
          out.amaxes,
          given(out.h.codes),
          given(out.h.scale),
          given(out.h.amax),
          given(out.h.decoded)};
}

const torch_ops::Op activation_gradients_op(kActivationGradients, activation_gradients_kernel,
                                            torch_ops::without_derivative());

}  // namespace

namespace torch_ops {

GradientValues activation_gradients_(const Tensor& dh, const ActivationArguments& of,
                                     const std::string& h_col, const QuantizeOptions& h) {
  if (can_skip_dispatcher({&dh, &of.gate, or_null(of.up), or_null(h.amax_col), or_null(h.rng)}))
    return compute(dh, of, h_col, h, true);
  GradientValues out;
  std::tie(out.up, out.amaxes, out.h.codes, out.h.scale, out.h.amax, out.h.decoded) =
      activation_gradients_op(dh, of.gate, of.up, of.activation, h_col, h.amax_col, h.rng,
                              h.stream_col, h.decoded_col);
  return out;
}

}  // namespace torch_ops

}  // namespace minifloat
