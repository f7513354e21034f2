#include "ops/activation_inputs.h"

#include <ATen/ATen.h>

#include "ops/bridge.h"
#include "ops/outputs.h"

namespace minifloat::torch_ops {
namespace {

Activation parse_activation(const char* op, const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  TORCH_CHECK_VALUE(name == "gelu_tanh", op,
                    ": expected activation 'silu', 'gelu' or 'gelu_tanh', got '", printable(name),
                    "'");
  return Activation::kGeluTanh;
}

// Requires `t` with the dtype, shape and device of gate.
void check_like_gate(const char* op, const char* name, const Tensor& t, const Tensor& gate) {
  TORCH_CHECK_VALUE(t.scalar_type() == gate.scalar_type() && t.sym_sizes().equals(gate.sym_sizes()),
                    op, ": expected ", name, " as gate, ", gate.scalar_type(), " ",
                    gate.sym_sizes(), ", got ", t.scalar_type(), " ", t.sym_sizes());
  TORCH_CHECK_VALUE(t.device() == gate.device(), op, ": expected ", name, " on ", gate.device(),
                    ", got ", t.device());
}

// Returns t (…, cols) as (rows, cols) with adjacent columns: a view, or a copy.
Tensor as_rows(const char* op, const char* name, const Tensor& t) {
  bridge::check_memory(op, name, t);
  const Tensor rows = t.dim() == 2 ? t : t.dim() == 1 ? t.unsqueeze(0) : t.flatten(0, -2);
  return rows.size(1) <= 1 || rows.stride(1) == 1 ? rows : rows.contiguous();
}

}  // namespace

void check_activation(const char* op, const ActivationArguments& of, const Tensor* dh,
                      bool is_matrix) {
  parse_activation(op, of.activation);
  bridge::check_value_dtype(op, "gate", of.gate);
  TORCH_CHECK_VALUE(
      of.gate.dim() >= 1 && (!is_matrix || of.gate.dim() == 2), op,
      is_matrix ? ": expected gate (rows, cols), got " : ": expected gate (…, cols), got ",
      of.gate.dim(), " dimensions");
  bridge::check_sizes(op, "gate", of.gate);
  if (of.up) check_like_gate(op, "up", *of.up, of.gate);
  if (dh) check_like_gate(op, "dh", *dh, of.gate);
}

ActivationInputs inputs_of(const char* op, const ActivationArguments& a, const Tensor* dh) {
  ActivationInputs in = {as_rows(op, "gate", a.gate),
                         a.up ? as_rows(op, "up", *a.up) : Tensor(),
                         dh ? as_rows(op, "dh", *dh) : Tensor(),
                         {}};
  SwiGlu& of = in.of;
  of.activation = parse_activation(op, a.activation);
  of.dtype = a.gate.scalar_type() == at::kFloat ? DType::kFloat32 : DType::kBFloat16;
  of.rows = in.gate.size(0);
  of.width = in.gate.size(1);
  of.gate = in.gate.const_data_ptr();
  of.gate_stride = in.gate.stride(0);
  if (a.up) of.up = in.up.const_data_ptr(), of.up_stride = in.up.stride(0);
  of.device = bridge::backend_of(a.gate);
  return in;
}

void check_unread(const char* op, const QuantizeOptions& options, const Tensor& like) {
  for (const auto& [name, t] :
       {std::pair{"amax_row", &options.amax_row}, std::pair{"amax_col", &options.amax_col},
        std::pair{"rng", &options.rng}})
    if (*t) {
      bridge::check_same_device(op, name, **t, like);
      bridge::check_memory_if_real(op, name, **t);
    }
}

Tensor empty_like_gate(const Tensor& gate) {
  return empty(gate, gate.sym_sizes(), gate.scalar_type());
}

}  // namespace minifloat::torch_ops
