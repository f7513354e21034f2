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

// Returns t, or an empty tensor where t is undefined: arguments of an op are defined.
Tensor or_empty(const Tensor& t, const Tensor& like) {
  return t.defined() ? t : at::empty({0}, like.options().dtype(at::kFloat));
}

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
      std::int64_t, const std::optional<Tensor>&, bool, bool, bool, bool, bool);
  static const auto op = find<Signature>("minifloat::quantize");
  return both_of(
      op.call(x, row, col, options.amax_row, options.amax_col, options.rng, options.stream_row,
              options.stream_col, options.origin, options.groups.table, options.groups.unit,
              options.row_ids, options.first_expert, options.groups.rows_from, options.decoded_row,
              options.decoded_col, options.fp8_row, options.fp8_col, options.amaxes_of_columns));
}

Tensor amax(const Tensor& x, const std::string& spec, bool columnwise,
            const QuantizeOptions& options) {
  using Signature =
      Tensor(const Tensor&, const std::string&, bool, const std::optional<Tensor>&, std::int64_t,
             const std::optional<Tensor>&, const std::optional<Tensor>&);
  static const auto op = find<Signature>("minifloat::amax");
  return op.call(x, spec, columnwise, options.rng,
                 columnwise ? options.stream_col : options.stream_row, options.groups.table,
                 options.groups.rows_from);
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

}  // namespace minifloat::torch_ops
