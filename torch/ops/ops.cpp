#include "ops/ops.h"

#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "ops/direct.h"
#include "ops/kernels.h"

namespace minifloat::torch_ops {
namespace {

template <class Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Returns the address of the tensor, or null where there is none.
const Tensor* or_null(const std::optional<Tensor>& t) { return t ? &*t : nullptr; }

// Returns t, or an empty tensor where t is undefined: arguments of an op are defined.
Tensor or_empty(const Tensor& t, const Tensor& like) {
  return t.defined() ? t : at::empty({0}, like.options().dtype(at::kFloat));
}

using EightTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

std::pair<QuantizedOperand, QuantizedOperand> both_of(const EightTensors& t) {
  const auto& [codes_row, scale_row, amax_row, decoded_row, codes_col, scale_col, amax_col,
               decoded_col] = t;
  return {{codes_row, scale_row, amax_row, decoded_row},
          {codes_col, scale_col, amax_col, decoded_col}};
}

std::pair<QuantizedOperand, QuantizedOperand> quantize_delayed(const Tensor& x,
                                                               const std::string& row,
                                                               const std::string& col,
                                                               const QuantizeOptions& options) {
  using Signature = EightTensors(
      const Tensor&, const std::string&, const std::string&, const Tensor&, std::int64_t,
      std::int64_t, const std::optional<Tensor>&, std::int64_t, std::int64_t,
      const std::optional<Tensor>&, std::int64_t, const std::optional<Tensor>&, std::int64_t,
      const std::optional<Tensor>&, bool, bool);
  static const auto op = find<Signature>("minifloat::quantize_delayed");
  const auto& [history, history_row, history_col] = *options.history;
  return both_of(op.call(x, row, col, history, history_row, history_col, options.rng,
                         options.stream_row, options.stream_col, options.groups.table,
                         options.groups.unit, options.row_ids, options.first_expert,
                         options.groups.rows_from, options.decoded_row, options.decoded_col));
}

}  // namespace

std::pair<QuantizedOperand, QuantizedOperand> quantize(const Tensor& x, const std::string& row,
                                                       const std::string& col,
                                                       const QuantizeOptions& options) {
  if (can_skip_dispatcher({&x, or_null(options.amax_row), or_null(options.amax_col),
                           or_null(options.rng), or_null(options.groups.table),
                           or_null(options.row_ids), or_null(options.groups.rows_from),
                           options.history ? &options.history->history : nullptr}))
    return direct_quantize(x, row, col, options);
  if (options.history) return quantize_delayed(x, row, col, options);
  using Signature = EightTensors(
      const Tensor&, const std::string&, const std::string&, const std::optional<Tensor>&,
      const std::optional<Tensor>&, const std::optional<Tensor>&, std::int64_t, std::int64_t,
      c10::SymIntArrayRef, const std::optional<Tensor>&, std::int64_t, const std::optional<Tensor>&,
      std::int64_t, const std::optional<Tensor>&, bool, bool, bool, bool);
  static const auto op = find<Signature>("minifloat::quantize");
  return both_of(op.call(x, row, col, options.amax_row, options.amax_col, options.rng,
                         options.stream_row, options.stream_col, options.origin,
                         options.groups.table, options.groups.unit, options.row_ids,
                         options.first_expert, options.groups.rows_from, options.decoded_row,
                         options.decoded_col, options.fp8_row, options.fp8_col));
}

Tensor amax(const Tensor& x, const std::string& spec, bool columnwise, const Groups& groups) {
  using Signature = Tensor(const Tensor&, const std::string&, bool, const std::optional<Tensor>&,
                           const std::optional<Tensor>&);
  static const auto op = find<Signature>("minifloat::amax");
  return op.call(x, spec, columnwise, groups.table, groups.rows_from);
}

Tensor decode(const Tensor& codes, const Tensor& scale, const Spec& spec, c10::SymInt cols,
              const Groups& groups) {
  const auto length = cols.maybe_as_int();
  if (length && can_skip_dispatcher({&codes, &scale, or_null(groups.table)}))
    return direct_decode(codes, scale, spec, *length, groups);
  using Signature = Tensor(const Tensor&, const Tensor&, const std::string&, c10::SymInt,
                           const std::optional<Tensor>&, std::int64_t);
  static const auto op = find<Signature>("minifloat::decode");
  return op.call(codes, scale, spec.str(), std::move(cols), groups.table, groups.unit);
}

std::pair<Tensor, Tensor> fp4_as_fp8(const Tensor& codes, const Tensor& scale, const Tensor& amax,
                                     const Spec& spec, c10::SymInt cols, const Groups& groups) {
  const auto length = cols.maybe_as_int();
  if (length && can_skip_dispatcher({&codes, &scale, &amax, or_null(groups.table)}))
    return direct_fp4_as_fp8({spec, codes, scale, amax, groups}, *length);
  using Signature =
      std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const std::string&,
                                 c10::SymInt, const std::optional<Tensor>&, std::int64_t);
  static const auto op = find<Signature>("minifloat::fp4_as_fp8");
  auto [fp8_codes, row_scale] = op.call(codes, scale, or_empty(amax, codes), spec.str(),
                                        std::move(cols), groups.table, groups.unit);
  return {fp8_codes, row_scale};
}

Tensor swizzle_scales(const Tensor& scale, const std::optional<Tensor>& offs,
                      const std::string& groups) {
  using Signature = Tensor(const Tensor&, const std::optional<Tensor>&, const std::string&);
  static const auto op = find<Signature>("minifloat::swizzle_scales");
  return op.call(scale, offs, groups);
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
              const std::string& recipe, const std::optional<Tensor>& rng,
              const std::optional<Tensor>& amax_history, std::int64_t stream,
              const std::optional<at::TensorList>& x_operands,
              const std::optional<at::TensorList>& weight_operands, const std::string& recompute,
              const std::optional<Tensor>& main_grad, const std::string& accumulate,
              const std::string& received) {
  using Signature = Tensor(
      const Tensor&, const Tensor&, const std::optional<Tensor>&, const std::string&,
      const std::optional<Tensor>&, const std::optional<Tensor>&, std::int64_t,
      const std::optional<at::TensorList>&, const std::optional<at::TensorList>&,
      const std::string&, const std::optional<Tensor>&, const std::string&, const std::string&);
  static const auto op = find<Signature>("minifloat::linear");
  return op.call(x, weight, bias, recipe, rng, amax_history, stream, x_operands, weight_operands,
                 recompute, main_grad, accumulate, received);
}

std::vector<Tensor> layer_operands(const Tensor& x, const std::string& recipe,
                                   const std::string& of, bool rowwise, bool columnwise,
                                   const std::optional<Tensor>& amax_history,
                                   const std::string& group, std::int64_t rank, std::int64_t ranks,
                                   std::int64_t weight_dim, std::optional<std::int64_t> token_dim,
                                   const std::optional<Tensor>& groups,
                                   const std::optional<Tensor>& rows_from) {
  using Signature = std::vector<Tensor>(
      const Tensor&, const std::string&, const std::string&, bool, bool,
      const std::optional<Tensor>&, const std::string&, std::int64_t, std::int64_t, std::int64_t,
      std::optional<std::int64_t>, const std::optional<Tensor>&, const std::optional<Tensor>&);
  static const auto op = find<Signature>("minifloat::layer_operands");
  return op.call(x, recipe, of, rowwise, columnwise, amax_history, group, rank, ranks, weight_dim,
                 token_dim, groups, rows_from);
}

Tensor scaled_grouped_mm(const Tensor& a, const Tensor& b, const Tensor& offs,
                         const std::string& recipe, at::ScalarType out_dtype,
                         const std::optional<Tensor>& bias, const std::optional<Tensor>& rng,
                         const std::optional<Tensor>& row_ids, std::int64_t first_expert,
                         const std::optional<Tensor>& amax_history, const std::string& tail,
                         std::int64_t stream, const std::optional<at::TensorList>& a_operands,
                         const std::optional<at::TensorList>& weight_operands,
                         const std::string& recompute) {
  using Signature =
      Tensor(const Tensor&, const Tensor&, const Tensor&, const std::string&, at::ScalarType,
             const std::optional<Tensor>&, const std::optional<Tensor>&,
             const std::optional<Tensor>&, std::int64_t, const std::optional<Tensor>&,
             const std::string&, std::int64_t, const std::optional<at::TensorList>&,
             const std::optional<at::TensorList>&, const std::string&);
  static const auto op = find<Signature>("minifloat::scaled_grouped_mm");
  return op.call(a, b, offs, recipe, out_dtype, bias, rng, row_ids, first_expert, amax_history,
                 tail, stream, a_operands, weight_operands, recompute);
}

std::vector<Tensor> linear_group(const Tensor& x, at::TensorList weights,
                                 const c10::List<std::optional<Tensor>>& biases,
                                 const std::string& recipe,
                                 const std::optional<at::TensorList>& rng,
                                 const std::optional<at::TensorList>& amax_history) {
  using Signature = std::vector<Tensor>(
      const Tensor&, at::TensorList, const c10::List<std::optional<Tensor>>&, const std::string&,
      const std::optional<at::TensorList>&, const std::optional<at::TensorList>&);
  static const auto op = find<Signature>("minifloat::linear_group");
  return op.call(x, weights, biases, recipe, rng, amax_history);
}

Tensor mlp(const Tensor& x, at::TensorList weights, const c10::List<std::optional<Tensor>>& biases,
           const std::string& recipe, const std::string& activation,
           const std::optional<at::TensorList>& rng,
           const std::optional<at::TensorList>& amax_history,
           const std::optional<at::IntArrayRef>& streams,
           const std::optional<at::TensorList>& x_operands,
           const std::optional<at::TensorList>& weight_operands, const std::string& recompute,
           const std::optional<at::TensorList>& main_grads, const std::string& accumulate,
           const std::string& received) {
  using Signature =
      Tensor(const Tensor&, at::TensorList, const c10::List<std::optional<Tensor>>&,
             const std::string&, const std::string&, const std::optional<at::TensorList>&,
             const std::optional<at::TensorList>&, const std::optional<at::IntArrayRef>&,
             const std::optional<at::TensorList>&, const std::optional<at::TensorList>&,
             const std::string&, const std::optional<at::TensorList>&, const std::string&,
             const std::string&);
  static const auto op = find<Signature>("minifloat::mlp");
  return op.call(x, weights, biases, recipe, activation, rng, amax_history, streams, x_operands,
                 weight_operands, recompute, main_grads, accumulate, received);
}

}  // namespace minifloat::torch_ops
