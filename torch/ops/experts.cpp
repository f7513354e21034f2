// The ops swiglu, quantize_swiglu and swiglu_backward: the activation between the products of
// experts. experts_autograd.cpp differentiates it.
#include "minifloat/experts.h"

#include <ATen/ATen.h>

#include <limits>

#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/expert_inputs.h"
#include "ops/experts.h"
#include "ops/groups.h"
#include "ops/kernels.h"
#include "ops/op.h"
#include "ops/outputs.h"

namespace minifloat {
namespace {

using at::Tensor;
using c10::SymInt;
using torch_ops::adjacent;
using torch_ops::check_index;
using torch_ops::check_matrix;
using torch_ops::Directions;
using torch_ops::EightTensors;
using torch_ops::SwiGluArguments;
using torch_ops::SwiGluGradientTensors;
using MaybeTensor = std::optional<Tensor>;

// ---- SwiGLU -------------------------------------------------------------------------------------
// Requires `t` in the dtype and on the device of the product, (rows, cols).
void check_like(const SwiGluArguments& a, const char* name, const Tensor& t, const SymInt& cols) {
  check_matrix(a.op, name, t);
  TORCH_CHECK_VALUE(t.scalar_type() == a.product.scalar_type() && t.sym_size(0) == a.rows() &&
                        t.sym_size(1) == cols,
                    a.op, ": expected ", name, " as ", a.product.scalar_type(), " (", a.rows(),
                    ", ", cols, "), got ", t.scalar_type(), " ", t.sym_sizes());
  TORCH_CHECK_VALUE(t.device() == a.product.device(), a.op, ": expected ", name, " on ",
                    a.product.device(), ", got ", t.device());
}

// Requires a number above zero that float32 holds.
void check_positive(const char* op, const char* name, double x) {
  const double most = std::numeric_limits<float>::max(), least = std::numeric_limits<float>::min();
  TORCH_CHECK_VALUE(least <= x && x <= most, op, ": expected ", name, " above 0 in float32, got ",
                    x);
}

void check_arguments(const SwiGluArguments& a) {
  torch_ops::check_form(a.op, a.limit, a.alpha, a.interleaved, a.other.has_value());
  check_matrix(a.op, "product", a.product);
  if (a.other) {
    check_like(a, "other", *a.other, a.product.sym_size(1));
  } else {
    TORCH_CHECK_VALUE(a.product.sym_size(1) % 2 == 0, a.op,
                      ": expected gate and up of the same width, got ", a.product.sym_size(1),
                      " columns of both");
  }
  TORCH_CHECK_VALUE(a.weights.scalar_type() == at::kFloat && a.weights.sym_numel() == a.rows(),
                    a.op, ": expected weights as float32, one for each of ", a.rows(),
                    " rows, got ", a.weights.scalar_type(), " ", a.weights.sym_sizes());
  TORCH_CHECK_VALUE(a.weights.device() == a.product.device(), a.op, ": expected weights on ",
                    a.product.device(), ", got ", a.weights.device());
  if (a.pairs) {
    check_index(a.op, "pairs", *a.pairs, 1, a.product);
    TORCH_CHECK_VALUE(a.pairs->sym_size(0) == a.rows(), a.op, ": expected pairs of ", a.rows(),
                      " rows, got ", a.pairs->sym_size(0));
  }
  torch_ops::check_groups(a.op, {a.groups}, a.product);
}

Tensor swiglu_shape(const SwiGluArguments& a) {
  check_arguments(a);
  return torch_ops::empty(a.product, {a.rows(), a.width()}, a.product.scalar_type());
}

SwiGluGradientTensors gradient_shapes(const SwiGluArguments& a, const Tensor& dh, bool amaxes) {
  check_arguments(a);
  check_like(a, "dh", dh, a.width());
  TORCH_CHECK_VALUE(!amaxes || a.groups, a.op, ": expected groups with amaxes, got none");
  const auto like = [](const Tensor& t) {
    return torch_ops::empty(t, t.sym_sizes(), t.scalar_type());
  };
  std::vector<Tensor> lines;
  const auto add_lines = [&](const Tensor& t) {
    const SymInt groups = a.groups->sym_size(1) - 1;
    lines.push_back(torch_ops::empty(t, {t.sym_size(0)}, at::kFloat));
    lines.push_back(torch_ops::empty(t, {groups, t.sym_size(1)}, at::kFloat));
  };
  if (amaxes) add_lines(a.product);
  if (amaxes && a.other) add_lines(*a.other);
  return {
      like(a.product),
      a.other ? like(*a.other) : torch_ops::empty(a.product, {SymInt(0)}, a.product.scalar_type()),
      like(a.weights), std::move(lines)};
}

// The inputs in memory that the kernels read.
struct SwiGluInputs {
  Tensor product, other, weights, pairs;
  SwiGlu of;
};
void check_memory_of(const SwiGluArguments& a) {
  for (const auto& [name, t] : {std::pair{"product", &a.product}, std::pair{"weights", &a.weights}})
    bridge::check_memory_if_real(a.op, name, *t);
  if (a.other) bridge::check_memory_if_real(a.op, "other", *a.other);
  if (a.pairs) bridge::check_memory_if_real(a.op, "pairs", *a.pairs);
}
SwiGluInputs inputs_of(const SwiGluArguments& a) {
  check_memory_of(a);
  SwiGluInputs in = {adjacent(a.product),
                     a.other ? adjacent(*a.other) : Tensor(),
                     a.weights.contiguous(),
                     a.pairs ? a.pairs->contiguous() : Tensor(),
                     {}};
  SwiGlu& of = in.of;
  of.dtype = a.product.scalar_type() == at::kFloat ? DType::kFloat32 : DType::kBFloat16;
  of.rows = a.product.size(0);
  of.width = a.product.size(1) / (a.other ? 1 : 2);
  of.is_interleaved = a.interleaved;
  const std::int64_t up_at = a.interleaved ? 1 : of.width;
  of.gate = in.product.const_data_ptr();
  of.gate_stride = of.up_stride = in.product.stride(0);
  if (a.other)
    of.up = in.other.const_data_ptr(), of.up_stride = in.other.stride(0);
  else
    of.up = static_cast<const char*>(of.gate) + up_at * a.product.element_size();
  of.weights = in.weights.const_data_ptr<float>();
  if (a.pairs) of.places = in.pairs.const_data_ptr<std::int32_t>();
  of.groups = torch_ops::group_table_of(a.op, {a.groups}, 0);
  of.has_limit = a.limit.has_value();
  of.limit = static_cast<float>(a.limit.value_or(0));
  of.alpha = static_cast<float>(a.alpha);
  of.device = bridge::backend_of(a.product);
  return in;
}

Tensor swiglu_meta(const Tensor& product, const MaybeTensor& other, const Tensor& weights,
                   std::optional<double> limit, double alpha, bool interleaved,
                   const MaybeTensor& pairs, const MaybeTensor& groups) {
  return swiglu_shape(
      {"swiglu", product, other, weights, limit, alpha, interleaved, pairs, groups});
}

Tensor swiglu_kernel(const Tensor& product, const MaybeTensor& other, const Tensor& weights,
                     std::optional<double> limit, double alpha, bool interleaved,
                     const MaybeTensor& pairs, const MaybeTensor& groups) {
  const SwiGluArguments a = {"swiglu", product,     other, weights, limit,
                             alpha,    interleaved, pairs, groups};
  const Tensor h = swiglu_shape(a);
  const SwiGluInputs in = inputs_of(a);
  bridge::with_value_errors(
      [&] { swiglu(in.of, h.mutable_data_ptr(), bridge::ExecutionOn(product)); });
  return h;
}

SwiGluGradientTensors swiglu_backward_meta(const Tensor& dh, const Tensor& product,
                                           const MaybeTensor& other, const Tensor& weights,
                                           std::optional<double> limit, double alpha,
                                           bool interleaved, const MaybeTensor& pairs,
                                           const MaybeTensor& groups, bool amaxes) {
  return gradient_shapes(
      {"swiglu_backward", product, other, weights, limit, alpha, interleaved, pairs, groups}, dh,
      amaxes);
}

SwiGluGradientTensors swiglu_backward_kernel(const Tensor& dh, const Tensor& product,
                                             const MaybeTensor& other, const Tensor& weights,
                                             std::optional<double> limit, double alpha,
                                             bool interleaved, const MaybeTensor& pairs,
                                             const MaybeTensor& groups, bool amaxes) {
  const SwiGluArguments a = {"swiglu_backward", product, other, weights, limit, alpha,
                             interleaved,       pairs,   groups};
  const SwiGluGradientTensors out = gradient_shapes(a, dh, amaxes);
  const auto& [d_product, d_other, d_weights, lines] = out;
  bridge::check_memory(a.op, "dh", dh);
  const SwiGluInputs in = inputs_of(a);
  const Tensor adjacent_dh = adjacent(dh);
  const std::int64_t up_at = interleaved ? 1 : in.of.width;
  SwiGluGradients to;
  to.dh = adjacent_dh.const_data_ptr();
  to.dh_stride = adjacent_dh.stride(0);
  to.gate = d_product.mutable_data_ptr();
  to.up = other ? d_other.mutable_data_ptr()
                : static_cast<char*>(to.gate) + up_at * product.element_size();
  to.stride = product.size(1);
  to.weights = d_weights.mutable_data_ptr<float>();
  const auto amaxes_at = [&](std::size_t i) -> LineAmaxes {
    return {lines[i].mutable_data_ptr<float>(), lines[i + 1].mutable_data_ptr<float>()};
  };
  if (amaxes) to.of_gate = amaxes_at(0);
  if (amaxes && other) to.of_up = amaxes_at(2);
  bridge::with_value_errors([&] { swiglu_backward(in.of, to, bridge::ExecutionOn(product)); });
  return out;
}

// ---- The cast of h ------------------------------------------------------------------------------
Directions cast_h(const SwiGluArguments& a, const std::string& row, const std::string& col,
                  const torch_ops::QuantizeOptions& options, bool shares_memory) {
  check_arguments(a);
  const SwiGluInputs in = inputs_of(a);
  const Tensor like_h = in.product.narrow(1, 0, in.of.width);
  const torch_ops::CastOfComputed cast = [&](const Operand* to_row, const Operand* to_col,
                                             const GroupTable& groups, const Execution& execution) {
    SwiGlu of = in.of;
    of.groups = groups;
    quantize_swiglu(of, to_row, to_col, execution);
  };
  return torch_ops::direct_quantize(like_h, row, col, options, &cast, shares_memory);
}

// The op, with real tensors or on the Meta device.
template <bool kIsMeta>
EightTensors quantize_swiglu_as(
    const Tensor& product, const MaybeTensor& other, const Tensor& weights, const std::string& row,
    const std::string& col, std::optional<double> limit, double alpha, bool interleaved,
    const MaybeTensor& pairs, const MaybeTensor& groups, std::int64_t unit,
    const MaybeTensor& amax_row, const MaybeTensor& amax_col, const MaybeTensor& rng,
    std::int64_t stream_row, std::int64_t stream_col, const MaybeTensor& row_ids,
    std::int64_t first_expert, bool decoded_row, bool decoded_col, bool amaxes_of_columns) {
  const SwiGluArguments a = {"quantize_swiglu", product, other, weights, limit, alpha,
                             interleaved,       pairs,   groups};
  const torch_ops::QuantizeOptions options = {.amax_row = amax_row,
                                              .amax_col = amax_col,
                                              .rng = rng,
                                              .stream_row = stream_row,
                                              .stream_col = stream_col,
                                              .decoded_row = decoded_row,
                                              .decoded_col = decoded_col,
                                              .amaxes_of_columns = amaxes_of_columns,
                                              .groups = {groups, unit},
                                              .row_ids = row_ids,
                                              .first_expert = first_expert};
  Directions out;
  if constexpr (kIsMeta) {
    check_arguments(a);
    out = torch_ops::quantize(a.like_h(), row, col, options);
  } else {
    out = cast_h(a, row, col, options, false);
  }
  return torch_ops::eight_tensors(out);
}

const torch_ops::Op swiglu_op("swiglu", swiglu_kernel, swiglu_meta);
const torch_ops::Op swiglu_backward_op("swiglu_backward", swiglu_backward_kernel,
                                       swiglu_backward_meta, torch_ops::refused());
const torch_ops::Op quantize_swiglu_op("quantize_swiglu", quantize_swiglu_as<false>,
                                       quantize_swiglu_as<true>, torch_ops::without_derivative());

}  // namespace

namespace torch_ops {

void check_form(const char* op, std::optional<double> limit, double alpha, bool interleaved,
                bool has_other) {
  if (limit) check_positive(op, "limit", *limit);
  check_positive(op, "alpha", alpha);
  TORCH_CHECK_VALUE(!(interleaved && has_other), op,
                    ": expected interleaved of one product, got two");
}

void check_swiglu(const SwiGluArguments& of) {
  check_arguments(of);
  check_memory_of(of);
}

Directions quantize_swiglu(const SwiGluArguments& of, const std::string& row,
                           const std::string& col, const QuantizeOptions& options) {
  if (can_skip_dispatcher({&of.product, or_null(of.other), &of.weights, or_null(of.pairs),
                           or_null(of.groups), or_null(options.amax_row), or_null(options.amax_col),
                           or_null(options.rng), or_null(options.row_ids)}))
    return cast_h(of, row, col, options, true);
  return both_of(quantize_swiglu_op(
      of.product, of.other, of.weights, row, col, of.limit, of.alpha, of.interleaved, of.pairs,
      options.groups.table, options.groups.unit, options.amax_row, options.amax_col, options.rng,
      options.stream_row, options.stream_col, options.row_ids, options.first_expert,
      options.decoded_row, options.decoded_col, options.amaxes_of_columns));
}

Tensor swiglu(const SwiGluArguments& of) {
  return swiglu_op(of.product, of.other, of.weights, of.limit, of.alpha, of.interleaved, of.pairs,
                   of.groups);
}

SwiGluGradientTensors swiglu_backward(const Tensor& dh, const SwiGluArguments& of, bool amaxes) {
  return swiglu_backward_op(dh, of.product, of.other, of.weights, of.limit, of.alpha,
                            of.interleaved, of.pairs, of.groups, amaxes);
}

}  // namespace torch_ops

}  // namespace minifloat
