#include "ops/activation_inputs.h"

#include <ATen/ATen.h>

#include <limits>

#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/expert_inputs.h"
#include "ops/groups.h"
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

void check_dense(const ActivationArguments& of, const Tensor* dh, bool is_matrix) {
  parse_activation(of.op, of.activation);
  bridge::check_value_dtype(of.op, "gate", of.gate);
  TORCH_CHECK_VALUE(
      of.gate.dim() >= 1 && (!is_matrix || of.gate.dim() == 2), of.op,
      is_matrix ? ": expected gate (rows, cols), got " : ": expected gate (…, cols), got ",
      of.gate.dim(), " dimensions");
  bridge::check_sizes(of.op, "gate", of.gate);
  if (of.up) check_like_gate(of.op, "up", *of.up, of.gate);
  if (dh) check_like_gate(of.op, "dh", *dh, of.gate);
}

// Requires `t` in the dtype and on the device of the product, (rows, cols).
void check_like_product(const ActivationArguments& a, const char* name, const Tensor& t,
                        const c10::SymInt& cols) {
  check_matrix(a.op, name, t);
  TORCH_CHECK_VALUE(
      t.scalar_type() == a.gate.scalar_type() && t.sym_size(0) == a.rows() && t.sym_size(1) == cols,
      a.op, ": expected ", name, " as ", a.gate.scalar_type(), " (", a.rows(), ", ", cols,
      "), got ", t.scalar_type(), " ", t.sym_sizes());
  TORCH_CHECK_VALUE(t.device() == a.gate.device(), a.op, ": expected ", name, " on ",
                    a.gate.device(), ", got ", t.device());
}

// Requires a number above zero that float32 holds.
void check_positive(const char* op, const char* name, double x) {
  const double most = std::numeric_limits<float>::max(), least = std::numeric_limits<float>::min();
  TORCH_CHECK_VALUE(least <= x && x <= most, op, ": expected ", name, " above 0 in float32, got ",
                    x);
}

void check_of_experts(const ActivationArguments& a, const Tensor* dh) {
  check_form(a.op, a.limit, a.alpha, a.interleaved, a.up.has_value());
  check_matrix(a.op, "product", a.gate);
  if (a.up) {
    check_like_product(a, "other", *a.up, a.gate.sym_size(1));
  } else {
    TORCH_CHECK_VALUE(a.gate.sym_size(1) % 2 == 0, a.op,
                      ": expected gate and up of the same width, got ", a.gate.sym_size(1),
                      " columns of both");
  }
  const Tensor& weights = *a.weights;
  TORCH_CHECK_VALUE(weights.scalar_type() == at::kFloat && weights.sym_numel() == a.rows(), a.op,
                    ": expected weights as float32, one for each of ", a.rows(), " rows, got ",
                    weights.scalar_type(), " ", weights.sym_sizes());
  TORCH_CHECK_VALUE(weights.device() == a.gate.device(), a.op, ": expected weights on ",
                    a.gate.device(), ", got ", weights.device());
  if (a.pairs) {
    check_index(a.op, "pairs", *a.pairs, 1, a.gate);
    TORCH_CHECK_VALUE(a.pairs->sym_size(0) == a.rows(), a.op, ": expected pairs of ", a.rows(),
                      " rows, got ", a.pairs->sym_size(0));
  }
  check_groups(a.op, {a.groups}, a.gate);
  if (dh) check_like_product(a, "dh", *dh, a.width());
}

// Returns t (…, cols) as (rows, cols) with adjacent columns: a view, or a copy.
Tensor as_rows(const char* op, const char* name, const Tensor& t) {
  bridge::check_memory(op, name, t);
  if (t.dim() == 2) return adjacent(t);
  return adjacent(t.dim() == 1 ? t.unsqueeze(0) : t.flatten(0, -2));
}

// Adds the inputs that experts alone have.
void add_experts(const ActivationArguments& a, ActivationInputs& in) {
  bridge::check_memory(a.op, "weights", *a.weights);
  in.weights = a.weights->contiguous();
  in.of.weights = in.weights.const_data_ptr<float>();
  if (a.pairs) {
    bridge::check_memory(a.op, "pairs", *a.pairs);
    in.pairs = a.pairs->contiguous();
    in.of.places = in.pairs.const_data_ptr<std::int32_t>();
  }
  in.of.groups = group_table_of(a.op, {a.groups}, 0);
  in.of.has_limit = a.limit.has_value();
  in.of.limit = static_cast<float>(a.limit.value_or(0));
  in.of.alpha = static_cast<float>(a.alpha);
}

}  // namespace

void check_form(const char* op, std::optional<double> limit, double alpha, bool interleaved,
                bool has_up) {
  if (limit) check_positive(op, "limit", *limit);
  check_positive(op, "alpha", alpha);
  TORCH_CHECK_VALUE(!(interleaved && has_up), op, ": expected interleaved of one product, got two");
}

void check_swiglu(const ActivationArguments& a) {
  check_of_experts(a, nullptr);
  for (const auto& [name, t] :
       {std::pair{"product", &a.gate}, std::pair{"weights", a.weights},
        std::pair{"other", or_null(a.up)}, std::pair{"pairs", or_null(a.pairs)}})
    if (t) bridge::check_memory_if_real(a.op, name, *t);
}

void check_activation(const ActivationArguments& of, const Tensor* dh, bool is_matrix) {
  of.weights ? check_of_experts(of, dh) : check_dense(of, dh, is_matrix);
}

ActivationInputs inputs_of(const ActivationArguments& a, const Tensor* dh) {
  ActivationInputs in;
  if (dh) in.dh = as_rows(a.op, "dh", *dh);
  in.gate = as_rows(a.op, a.weights ? "product" : "gate", a.gate);
  if (a.up) in.up = as_rows(a.op, a.weights ? "other" : "up", *a.up);
  SwiGlu& of = in.of;
  of.activation = parse_activation(a.op, a.activation);
  of.dtype = a.gate.scalar_type() == at::kFloat ? DType::kFloat32 : DType::kBFloat16;
  of.rows = in.gate.size(0);
  of.width = in.gate.size(1) / (a.is_joint() ? 2 : 1);
  of.is_interleaved = a.interleaved;
  of.gate = in.gate.const_data_ptr();
  of.gate_stride = of.up_stride = in.gate.stride(0);
  if (a.up)
    of.up = in.up.const_data_ptr(), of.up_stride = in.up.stride(0);
  else if (a.is_joint())
    of.up = static_cast<const char*>(of.gate) + in.up_at() * a.gate.element_size();
  of.device = bridge::backend_of(a.gate);
  if (a.weights) add_experts(a, in);
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

Tensor uninitialized_like(const Tensor& t) { return empty(t, t.sym_sizes(), t.scalar_type()); }

Tensor no_values(const Tensor& t) { return empty(t, {c10::SymInt(0)}, t.scalar_type()); }

}  // namespace minifloat::torch_ops
