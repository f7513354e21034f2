// The ops norm and quantize_norm: each has a Meta kernel, and one kernel for CPU and CUDA.
// norm_autograd.cpp differentiates them.
#include "ops/norm.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>

#include "minifloat/norm.h"
#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/kernels.h"
#include "ops/outputs.h"

namespace minifloat {
namespace {

using at::Tensor;
using c10::SymInt;
using torch_ops::EightTensors;
using torch_ops::NormArguments;
using torch_ops::QuantizedOperand;
using torch_ops::QuantizeOptions;
using MaybeTensor = std::optional<Tensor>;
using Directions = std::pair<QuantizedOperand, QuantizedOperand>;

void check_parameter(const NormArguments& a, const char* name, const MaybeTensor& t) {
  if (!t) return;
  bridge::check_value_dtype(a.op, name, *t);
  TORCH_CHECK_VALUE(t->dim() == 1 && t->sym_size(0) == a.x.sym_size(-1), a.op, ": expected ", name,
                    " of ", a.x.sym_size(-1), " elements, got ", t->sym_sizes());
  TORCH_CHECK_VALUE(t->device() == a.x.device(), a.op, ": expected ", name, " on ", a.x.device(),
                    ", got ", t->device());
}

SymInt rows_of(const Tensor& x) {
  SymInt rows = 1;
  for (std::int64_t i = 0; i + 1 < x.dim(); ++i) rows = rows * x.sym_size(i);
  return rows;
}

Tensor like_x(const NormArguments& a) {
  return torch_ops::empty(a.x, a.x.sym_sizes(), a.x.scalar_type());
}
// Returns a tensor of the shape of the matrix that is cast, (M, D).
Tensor like_matrix(const NormArguments& a) {
  return torch_ops::empty(a.x, {rows_of(a.x), a.x.sym_size(-1)}, a.x.scalar_type());
}

// Returns x (…, D) as rows of adjacent columns: a view, or a copy.
Tensor as_rows(const char* op, const char* name, const Tensor& x) {
  bridge::check_memory(op, name, x);
  const std::int64_t cols = x.size(-1);
  const Tensor rows = x.dim() == 2 ? x : x.reshape({rows_of(x).expect_int(), cols});
  return cols <= 1 || rows.stride(1) == 1 ? rows : rows.contiguous();
}

// The inputs in memory that the kernels read.
struct NormInputs {
  Tensor x, weight, bias;
  Norm of;
};
NormInputs norm_inputs(const NormArguments& a) {
  const NormKind kind = torch_ops::check_norm(a);
  const auto parameter = [&](const char* name, const MaybeTensor& t) {
    if (t) bridge::check_memory(a.op, name, *t);
    return t ? t->contiguous() : Tensor();
  };
  NormInputs in = {
      as_rows(a.op, "x", a.x), parameter("weight", a.weight), parameter("bias", a.bias), {}};
  const auto dtype_of = [](const Tensor& t) {
    return t.defined() && t.scalar_type() == at::kBFloat16 ? DType::kBFloat16 : DType::kFloat32;
  };
  const auto data_of = [](const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; };
  Norm& of = in.of;
  of.x = in.x.const_data_ptr();
  of.dtype = dtype_of(in.x);
  of.rows = in.x.size(0);
  of.cols = in.x.size(1);
  of.row_stride = in.x.stride(0);
  of.weight = data_of(in.weight);
  of.weight_dtype = dtype_of(in.weight);
  of.bias = data_of(in.bias);
  of.bias_dtype = dtype_of(in.bias);
  of.kind = kind;
  of.eps = static_cast<float>(a.eps);
  of.device = bridge::backend_of(a.x);
  return in;
}

// ---- Values -------------------------------------------------------------------------------------
template <bool kIsMeta>
Tensor norm_op(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
               const std::string& kind, double eps) {
  const NormArguments a = {"norm", x, weight, bias, kind, eps};
  torch_ops::check_norm(a);
  const Tensor y = like_x(a);
  if constexpr (kIsMeta) return y;
  const NormInputs in = norm_inputs(a);
  bridge::with_value_errors([&] { norm(in.of, y.mutable_data_ptr(), bridge::ExecutionOn(x)); });
  return y;
}

// ---- Casts --------------------------------------------------------------------------------------
Directions cast_norm(const NormArguments& a, const std::string& row, const std::string& col,
                     const QuantizeOptions& options, bool shares_memory) {
  torch_ops::check_norm(a);
  const NormInputs in = norm_inputs(a);
  const torch_ops::CastOfComputed cast = [&](const Operand* to_row, const Operand* to_col,
                                             const GroupTable&, const Execution& execution) {
    quantize_norm(in.of, to_row, to_col, execution);
  };
  return torch_ops::direct_quantize(in.x, row, col, options, &cast, shares_memory);
}

template <bool kIsMeta>
EightTensors quantize_op(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                         const std::string& kind, double eps, const std::string& row,
                         const std::string& col, const MaybeTensor& amax_row,
                         const MaybeTensor& amax_col, const MaybeTensor& rng,
                         std::int64_t stream_row, std::int64_t stream_col,
                         c10::SymIntArrayRef origin, bool decoded_row, bool decoded_col) {
  const NormArguments a = {"quantize_norm", x, weight, bias, kind, eps};
  const QuantizeOptions options = torch_ops::options_of(
      a.op, amax_row, amax_col, rng, stream_row, stream_col, origin, decoded_row, decoded_col);
  torch_ops::check_norm(a);
  return torch_ops::eight_tensors(kIsMeta ? torch_ops::quantize(like_matrix(a), row, col, options)
                                          : cast_norm(a, row, col, options, false));
}

template <bool kIsMeta>
void register_norms(torch::Library& m) {
  m.impl("norm", norm_op<kIsMeta>);
  m.impl("quantize_norm", quantize_op<kIsMeta>);
}

}  // namespace

namespace torch_ops {

NormKind check_norm(const NormArguments& a) {
  const auto check_memory = [&](const char* name, const MaybeTensor& t) {
    if (t) bridge::check_memory_if_real(a.op, name, *t);
  };
  const bool is_layer = a.kind == "layer";
  TORCH_CHECK_VALUE(is_layer || a.kind == "rms" || a.kind == "rms_rounded", a.op,
                    ": expected kind as \"rms\", \"rms_rounded\" or \"layer\", got \"",
                    printable(a.kind), "\"");
  TORCH_CHECK_VALUE(0 <= a.eps && a.eps <= std::numeric_limits<float>::max(), a.op,
                    ": expected eps of 0 or more in float32, got ", a.eps);
  bridge::check_value_dtype(a.op, "x", a.x);
  TORCH_CHECK_VALUE(a.x.dim() >= 1, a.op, ": expected x (…, D), got a number");
  TORCH_CHECK_VALUE(a.x.layout() == at::kStrided, a.op, ": expected x as a dense tensor, got ",
                    a.x.layout());
  bridge::check_sizes(a.op, "x", a.x);
  check_parameter(a, "weight", a.weight);
  TORCH_CHECK_VALUE(!a.bias || is_layer, a.op, ": expected a bias with kind \"layer\" alone");
  check_parameter(a, "bias", a.bias);
  check_memory("x", a.x);
  check_memory("weight", a.weight);
  check_memory("bias", a.bias);
  if (is_layer) return NormKind::kLayer;
  return a.kind == "rms" ? NormKind::kRms : NormKind::kRmsRounded;
}

std::pair<QuantizedOperand, QuantizedOperand> quantize_norm(const NormArguments& a,
                                                            const std::string& row,
                                                            const std::string& col,
                                                            const QuantizeOptions& o) {
  const auto or_null = [](const MaybeTensor& t) { return t ? &*t : nullptr; };
  if (can_skip_dispatcher({&a.x, or_null(a.weight), or_null(a.bias), or_null(o.amax_row),
                           or_null(o.amax_col), or_null(o.rng)}))
    return cast_norm(a, row, col, o, true);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("minifloat::quantize_norm", "")
                             .typed<decltype(quantize_op<false>)>();
  auto [codes_row, scale_row, amax_row, decoded_row, codes_col, scale_col, amax_col, decoded_col] =
      op.call(a.x, a.weight, a.bias, a.kind, a.eps, row, col, o.amax_row, o.amax_col, o.rng,
              o.stream_row, o.stream_col, o.origin, o.decoded_row, o.decoded_col);
  return {{codes_row, scale_row, amax_row, decoded_row},
          {codes_col, scale_col, amax_col, decoded_col}};
}

std::pair<Tensor, Tensor> direct_norm_statistics(const Tensor& x, NormKind kind, double eps) {
  const MaybeTensor none;
  const std::string text = kind == NormKind::kLayer ? "layer" : "rms";
  const NormInputs in = norm_inputs({"norm_backward", x, none, none, text, eps});
  c10::DimVector shape(x.sizes().begin(), x.sizes().end());
  shape.back() = 1;
  const Tensor factors = direct_empty(x, shape, at::kFloat);
  const Tensor means = kind == NormKind::kLayer ? direct_empty(x, shape, at::kFloat) : Tensor();
  bridge::with_value_errors([&] {
    norm_statistics(in.of, factors.mutable_data_ptr<float>(),
                    means.defined() ? means.mutable_data_ptr<float>() : nullptr,
                    bridge::ExecutionOn(x));
  });
  return {factors, means};
}

}  // namespace torch_ops

TORCH_LIBRARY_IMPL(minifloat, CPU, m) { register_norms<false>(m); }
TORCH_LIBRARY_IMPL(minifloat, CUDA, m) { register_norms<false>(m); }
TORCH_LIBRARY_IMPL(minifloat, Meta, m) { register_norms<true>(m); }

}  // namespace minifloat
