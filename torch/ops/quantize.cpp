// The op quantize: values to codes. One kernel for CPU and CUDA: the torch-free API dispatches on
// the device.
#include "minifloat/quantize.h"

#include <ATen/ATen.h>

#include "ops/as_read.h"
#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/history.h"
#include "ops/kernels.h"
#include "ops/op.h"
#include "ops/ops.h"
#include "ops/outputs.h"

namespace minifloat {
namespace {

using at::Tensor;
using c10::SymInt;
using torch_ops::advise_huge_pages;
using torch_ops::as_read;
using torch_ops::AsRead;
using torch_ops::Directions;
using torch_ops::EightTensors;
using torch_ops::empty;
using torch_ops::QuantizedOperand;
using torch_ops::QuantizeOptions;
using torch_ops::scale_dtype;
using torch_ops::Sizes;

// The arguments of the op for one direction.
struct DirectionArguments {
  bool columnwise;
  std::optional<Spec> spec;                  // none: absent
  const std::optional<Tensor>& active_amax;  // none: computed from x
  std::int64_t stream;
  bool decoded, as_fp8, swizzled;
  // Whether the current amax of +delayed goes to a history, and where; else it is an output.
  bool raises_history = false;
  HistoryEntries history = {};

  AsRead<SymInt> read_of(const Tensor& x, const torch_ops::Groups& groups) const {
    return as_read(x, *spec, columnwise, groups);
  }
  at::ScalarType code_dtype() const { return as_fp8 ? at::kFloat8_e4m3fn : at::kByte; }
  at::ScalarType dtype_of_scale() const { return as_fp8 ? at::kFloat : scale_dtype(*spec); }
  template <class Int>
  Sizes<Int> code_shape(const AsRead<Int>& read) const {
    return as_fp8 ? read.decoded(*spec) : read.codes(*spec);
  }
  template <class Int>
  Sizes<Int> scale_shape(const AsRead<Int>& read) const {
    return as_fp8 ? read.row_scale() : swizzled ? read.swizzled(*spec) : read.scale(*spec);
  }
};

QuantizedOperand allocate(const Tensor& x, const DirectionArguments& d,
                          const AsRead<SymInt>& read) {
  const auto values = d.decoded ? read.decoded(*d.spec) : Sizes<SymInt>{SymInt(0)};
  return {empty(x, d.code_shape(read), d.code_dtype()),
          empty(x, d.scale_shape(read), d.dtype_of_scale()),
          d.raises_history ? empty(x, {SymInt(0)}, at::kFloat)
                           : empty(x, read.amax(*d.spec), at::kFloat),
          empty(x, values, at::kBFloat16)};
}

// Allocates the outputs of a direction as one allocation. Absent outputs are undefined, and so are
// codes beside their values. For direct calls alone: the outputs of an op do not share memory.
QuantizedOperand allocate_together(const Tensor& x, const DirectionArguments& d,
                                   const AsRead<SymInt>& symbolic) {
  const Spec& spec = *d.spec;
  using torch_ops::direct_view;
  constexpr std::int64_t kAlignment = 256;  // bytes, as CUDA's own allocations
  const auto real = [](const SymInt& n) { return n.guard_int(__FILE__, __LINE__); };
  AsRead<std::int64_t> read = {.batch = {},
                               .groups = {},
                               .rows = real(symbolic.rows),
                               .cols = real(symbolic.cols),
                               .columnwise = symbolic.columnwise};
  if (symbolic.batch) read.batch = real(*symbolic.batch);
  if (symbolic.groups) read.groups = real(*symbolic.groups);
  struct Part {
    at::ScalarType dtype;
    Sizes<std::int64_t> shape;
    std::int64_t begin;  // bytes
  };
  std::int64_t end = 0;
  const auto part = [&](at::ScalarType dtype, Sizes<std::int64_t> shape) {
    Part p{dtype, std::move(shape), (end + kAlignment - 1) / kAlignment * kAlignment};
    std::int64_t bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
    for (const std::int64_t n : p.shape) bytes *= n;
    end = p.begin + bytes;
    return p;
  };
  const bool has_amax = !d.raises_history && (spec.has_row_amax() || spec.has_tensor_amax());
  const auto codes =
      d.decoded ? std::nullopt : std::optional(part(d.code_dtype(), d.code_shape(read)));
  const Part scale = part(d.dtype_of_scale(), d.scale_shape(read));
  const auto amax = has_amax ? std::optional(part(at::kFloat, read.amax(spec))) : std::nullopt;
  const auto values =
      d.decoded ? std::optional(part(at::kBFloat16, read.decoded(spec))) : std::nullopt;

  const Tensor memory = torch_ops::direct_empty(x, {end}, at::kByte);
  if (x.is_cpu()) advise_huge_pages(memory);
  const auto tensor = [&](const Part& p) {
    return direct_view(memory, p.dtype, p.shape,
                       p.begin / static_cast<std::int64_t>(c10::elementSize(p.dtype)));
  };
  const auto tensor_or_none = [&](const auto& p) { return p ? tensor(*p) : Tensor(); };
  return {tensor_or_none(codes), tensor(scale), tensor_or_none(amax), tensor_or_none(values)};
}

QuantizedOperand absent(const Tensor& x) {
  const auto none = [&](at::ScalarType dtype) { return empty(x, {SymInt(0)}, dtype); };
  return {none(at::kByte), none(at::kFloat), none(at::kFloat), none(at::kBFloat16)};
}

std::optional<Spec> spec_of(const std::string& text) {
  if (text.empty()) return {};
  const Spec& spec = bridge::parse_spec(text);
  TORCH_CHECK_VALUE(!spec.is_bf16(),
                    "quantize: bf16 is the identity and has no codes; expected a quantizing spec");
  return spec;
}

// amax: outlives the arguments
DirectionArguments row_arguments(const std::string& text, const std::optional<Tensor>& amax,
                                 const QuantizeOptions& o) {
  return {false, spec_of(text), amax, o.stream_row, o.decoded_row, o.fp8_row, o.swizzled_row};
}
DirectionArguments col_arguments(const std::string& text, const std::optional<Tensor>& amax,
                                 const QuantizeOptions& o) {
  return {true, spec_of(text), amax, o.stream_col, o.decoded_col, o.fp8_col, o.swizzled_col};
}

// Scales a +delayed direction by the active amaxes of a row of a history, and raises its current
// ones.   active: that of the arguments
void read_history(DirectionArguments& d, const Tensor& history, std::int64_t row,
                  std::optional<Tensor>& active) {
  if (!d.spec || !d.spec->delayed) return;
  d.raises_history = true;
  active = torch_ops::active_amax(history, row);
  if (history.is_meta()) return;
  float* const first = history.mutable_data_ptr<float>() + row * history.stride(0);
  d.history = {first + torch_ops::kCurrent * history.stride(-1),
               history.dim() == 3 ? history.stride(1) : 0};
}

void check_is_written_as_fp8(const DirectionArguments& d) {
  TORCH_CHECK_VALUE(d.spec && d.spec->is_fp4_by_powers_of_two(),
                    "quantize: expected 4-bit codes under powers of two (mxfp4, nvfp4+pow2, "
                    "e1m2/1x32 or e1m2/1x16+pow2) as FP8, got ",
                    d.spec ? d.spec->str() : "no spec");
  TORCH_CHECK_VALUE(!d.decoded, "quantize: expected FP8 codes of ", d.spec->str(),
                    " or decoded values, got both");
}

void check_is_swizzled(const DirectionArguments& d, const torch_ops::Groups& groups) {
  const bool has_bytes = d.spec && d.spec->has_blocks() && d.spec->scale_bytes() == 1;
  TORCH_CHECK_VALUE(has_bytes && !d.as_fp8 && !groups.table,
                    "quantize: expected swizzled scales of MX or NVFP4, without groups and codes "
                    "as FP8, got ",
                    d.spec ? d.spec->str() : "no spec", groups.table ? " with groups" : "",
                    d.as_fp8 ? " as FP8" : "");
}

void check_direction(const Tensor& x, const DirectionArguments& d, const QuantizeOptions& shared) {
  if (d.spec && d.spec->stochastic)
    TORCH_CHECK_VALUE(shared.rng.has_value(), "quantize: ", d.spec->str(),
                      " rounds stochastically and needs rng, an int64 tensor (seed, count)");
  TORCH_CHECK_VALUE(!d.spec || !d.spec->has_blocks_2d() || !shared.groups.table,
                    "quantize: ", d.spec->str(),
                    " has blocks of several rows, which the end of a group would cut; expected a "
                    "spec with blocks of one row for values in groups");
  if (d.as_fp8) check_is_written_as_fp8(d);
  if (d.swizzled) check_is_swizzled(d, shared.groups);
  TORCH_CHECK_VALUE(!d.spec || !d.decoded || !d.spec->has_fp32_values(),
                    "quantize: expected decoded values that bf16 holds, got those of ",
                    d.spec->str(), ", which are fp32");
  if (!d.active_amax) return;
  TORCH_CHECK_VALUE(d.spec.has_value(), "quantize: expected no amax of a direction without a spec");
  const bool takes_amax = d.spec->has_tensor_amax() || d.spec->has_row_amax();
  TORCH_CHECK_VALUE(takes_amax, "quantize: ", d.spec->str(),
                    " has no tensor or row amax; expected no amax");
  const auto shape = d.read_of(x, shared.groups).amax(*d.spec);
  TORCH_CHECK_VALUE(d.active_amax->scalar_type() == at::kFloat &&
                        d.active_amax->sym_sizes().equals(c10::SymIntArrayRef(shape)),
                    "quantize: expected amax as float32 ", c10::SymIntArrayRef(shape), ", got ",
                    d.active_amax->scalar_type(), " ", d.active_amax->sym_sizes());
  TORCH_CHECK_VALUE(d.active_amax->device() == x.device(), "quantize: expected amax on ",
                    x.device(), ", got ", d.active_amax->device());
}

void check_shared(const Tensor& x, const QuantizeOptions& shared) {
  const auto& [rng, groups, row_ids] = std::tie(shared.rng, shared.groups, shared.row_ids);
  if (rng) bridge::check_rng("quantize", *rng, x);
  torch_ops::check_groups("quantize", groups, x);
  TORCH_CHECK_VALUE(!groups.table || x.dim() == 2,
                    "quantize: expected x (rows, cols) with groups, got ", x.dim(), " dimensions");
  TORCH_CHECK_VALUE(
      shared.first_expert == 0 || (shared.first_expert > 0 && (groups.table || x.dim() == 3)),
      "quantize: expected first_expert of groups or a batch, 0 or more, got ", shared.first_expert);
  if (!row_ids) return;
  TORCH_CHECK_VALUE(groups.table && row_ids->scalar_type() == at::kInt && row_ids->dim() == 1 &&
                        row_ids->sym_size(0) == torch_ops::rows_of(x, groups),
                    "quantize: expected row_ids with groups, as int32 (",
                    torch_ops::rows_of(x, groups), "), got ", row_ids->scalar_type(), " ",
                    row_ids->sym_sizes(), groups.table ? "" : " without groups");
  bridge::check_same_device("quantize", "row_ids", *row_ids, x);
}

// Checks the arguments of quantize, with or without memory.
void check_arguments(const Tensor& x, const DirectionArguments& row, const DirectionArguments& col,
                     const QuantizeOptions& shared) {
  check_shared(x, shared);
  check_direction(x, row, shared);
  check_direction(x, col, shared);
  TORCH_CHECK_VALUE(row.spec || col.spec,
                    "quantize: expected a rowwise or a columnwise operand, got neither");
  TORCH_CHECK_VALUE(
      !shared.amaxes_of_columns ||
          (row.spec && !col.spec && row.spec->has_row_amax() && row.spec->transform == 0),
      "quantize: expected amaxes_of_columns of values that are cast rowwise alone, under an "
      "untransformed scale a row, got ",
      row.spec ? row.spec->str() : "no spec", " rowwise and ",
      col.spec ? col.spec->str() : "no spec", " columnwise");
}

// Returns the columnwise direction of a cast by `row` that finds the amaxes of columns alone.
QuantizedOperand allocate_amaxes_of_columns(const Tensor& x, const Spec& row,
                                            const torch_ops::Groups& groups) {
  QuantizedOperand out = absent(x);
  out.amax = empty(x, as_read(x, row, /*columnwise=*/true, groups).amax(row), at::kFloat);
  return out;
}

// Allocates the outputs of a direction: together for a direct call, apart for an op, whose absent
// ones are empty.
QuantizedOperand allocate_direction(const Tensor& x, const DirectionArguments& d,
                                    const torch_ops::Groups& groups, bool shares_memory) {
  if (!d.spec) return shares_memory ? QuantizedOperand() : absent(x);
  const AsRead<SymInt> read = d.read_of(x, groups);
  return shares_memory ? allocate_together(x, d, read) : allocate(x, d, read);
}

template <class T>
T* data_or_null(const Tensor& t) {
  return !t.defined() || t.numel() == 0 ? nullptr : static_cast<T*>(t.data_ptr());
}

// An Operand, and the contiguous active amax that it points to.
struct OperandHolder {
  Tensor amax;
  Operand operand;
};

// The inputs of a cast that both directions read, in contiguous memory.
struct CastInputs {
  TensorRef x;
  Tensor rng, row_ids;
  torch_ops::Groups groups;
  std::int64_t first_expert;
  c10::IntArrayRef origin;
};

void fill_operand(OperandHolder& holder, const DirectionArguments& d, const QuantizedOperand& out,
                  const CastInputs& in) {
  Operand& o = holder.operand;
  o.spec = *d.spec;
  if (d.active_amax) {
    bridge::check_memory("quantize", "amax", *d.active_amax);
    holder.amax = d.active_amax->contiguous();
    o.given_amax = holder.amax.const_data_ptr<float>();
  }
  if (d.spec->stochastic)
    o.random = {in.rng.const_data_ptr<std::int64_t>(), static_cast<int>(in.rng.size(0)),
                static_cast<std::uint64_t>(d.stream)};
  o.origin = d.columnwise ? Origin{in.origin[1], in.origin[0]} : Origin{in.origin[0], in.origin[1]};
  // Rows of the counter that are numbered by experts: those of a batch, and of columnwise groups.
  if (!in.groups.table || d.columnwise)
    o.origin.row += in.first_expert * (d.columnwise ? in.x.cols : in.x.rows);
  else if (in.row_ids.defined())
    o.random.row_ids = in.row_ids.const_data_ptr<std::int32_t>();
  o.codes = data_or_null<std::uint8_t>(out.codes);
  o.scale = data_or_null<void>(out.scale);
  o.amax = data_or_null<float>(out.amax);
  o.history = d.history;
  o.decoded = data_or_null<std::uint16_t>(out.decoded);
  o.as_fp8 = d.as_fp8;
  o.swizzled = d.swizzled;
}

// Quantizes into the outputs of the directions that have a spec.
void fill(TensorRef in, const DirectionArguments& r, const QuantizedOperand& out_row,
          const DirectionArguments& c, const QuantizedOperand& out_col,
          const QuantizeOptions& shared, const torch_ops::CastOfComputed* of,
          const Execution& execution) {
  const auto contiguous = [](const char* name, const std::optional<Tensor>& t) {
    if (t) bridge::check_memory("quantize", name, *t);
    return t ? t->contiguous() : Tensor();
  };
  const std::int64_t unit = c.spec ? torch_ops::unit_of(*c.spec, shared.groups) : 0;
  torch_ops::set_groups("quantize", shared.groups, unit, in);
  const CastInputs inputs = {in,
                             contiguous("rng", shared.rng),
                             contiguous("row_ids", shared.row_ids),
                             shared.groups,
                             shared.first_expert,
                             C10_AS_INTARRAYREF_SLOW(shared.origin)};
  OperandHolder row, col;
  if (r.spec) fill_operand(row, r, out_row, inputs);
  if (c.spec) fill_operand(col, c, out_col, inputs);
  if (shared.amaxes_of_columns) row.operand.amaxes_of_columns = data_or_null<float>(out_col.amax);
  const Operand *to_row = r.spec ? &row.operand : nullptr,
                *to_col = c.spec ? &col.operand : nullptr;
  bridge::with_value_errors([&] {
    if (!of) return quantize(in, to_row, to_col, execution);
    (*of)(to_row, to_col, in.groups, execution);
  });
}

EightTensors quantize_kernel(const Tensor& x, const std::string& row, const std::string& col,
                             const std::optional<Tensor>& amax_row,
                             const std::optional<Tensor>& amax_col,
                             const std::optional<Tensor>& rng, std::int64_t stream_row,
                             std::int64_t stream_col, c10::SymIntArrayRef origin,
                             const std::optional<Tensor>& groups, std::int64_t unit,
                             const std::optional<Tensor>& row_ids, std::int64_t first_expert,
                             const std::optional<Tensor>& rows_from, bool decoded_row,
                             bool decoded_col, bool fp8_row, bool fp8_col, bool swizzled_row,
                             bool swizzled_col, bool amaxes_of_columns) {
  QuantizeOptions options = torch_ops::options_of("quantize", amax_row, amax_col, rng, stream_row,
                                                  stream_col, origin, decoded_row, decoded_col);
  options.fp8_row = fp8_row, options.fp8_col = fp8_col;
  options.swizzled_row = swizzled_row, options.swizzled_col = swizzled_col;
  options.amaxes_of_columns = amaxes_of_columns;
  options.groups = {groups, unit, rows_from};
  options.row_ids = row_ids;
  options.first_expert = first_expert;
  return torch_ops::eight_tensors(
      torch_ops::direct_quantize(x, row, col, options, nullptr, /*shares_memory=*/false));
}

// Codes have no derivative. layers/linear.cpp has the derivatives of layers.
const torch_ops::Op quantize_op("quantize", quantize_kernel, torch_ops::without_derivative());

}  // namespace

namespace torch_ops {

Directions direct_quantize(const Tensor& x, const std::string& row, const std::string& col,
                           const QuantizeOptions& options, const CastOfComputed* of,
                           bool shares_memory) {
  TensorRef in;
  if (x.is_meta())
    bridge::check_values("quantize", x);
  else
    in = bridge::tensor_ref("quantize", x);
  std::optional<Tensor> amax_row = options.amax_row, amax_col = options.amax_col;
  DirectionArguments r = row_arguments(row, amax_row, options),
                     c = col_arguments(col, amax_col, options);
  if (options.history) {
    const auto& [history, row_of_row, row_of_col] = *options.history;
    read_history(r, history, row_of_row, amax_row);
    read_history(c, history, row_of_col, amax_col);
  }
  check_arguments(x, r, c, options);
  const bridge::ExecutionOn here(x);
  const Directions out = {
      allocate_direction(x, r, options.groups, shares_memory && !options.apart_row),
      options.amaxes_of_columns
          ? allocate_amaxes_of_columns(x, *r.spec, options.groups)
          : allocate_direction(x, c, options.groups, shares_memory && !options.apart_col)};
  if (!x.is_meta()) fill(in, r, out.first, c, out.second, options, of, here);
  return out;
}

Directions quantize(const Tensor& x, const std::string& row, const std::string& col,
                    const QuantizeOptions& options) {
  if (can_skip_dispatcher({&x, or_null(options.amax_row), or_null(options.amax_col),
                           or_null(options.rng), or_null(options.groups.table),
                           or_null(options.row_ids), or_null(options.groups.rows_from),
                           options.history ? &options.history->history : nullptr}))
    return direct_quantize(x, row, col, options);
  if (options.history) return quantize_by_history(x, row, col, options);
  return both_of(
      quantize_op(x, row, col, options.amax_row, options.amax_col, options.rng, options.stream_row,
                  options.stream_col, options.origin, options.groups.table, options.groups.unit,
                  options.row_ids, options.first_expert, options.groups.rows_from,
                  options.decoded_row, options.decoded_col, options.fp8_row, options.fp8_col,
                  options.swizzled_row, options.swizzled_col, options.amaxes_of_columns));
}

}  // namespace torch_ops

}  // namespace minifloat
