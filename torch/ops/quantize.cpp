// The ops amax and quantize: values to codes. Each has a Meta kernel, which gives the shapes, and
// one kernel for CPU and CUDA, which fills them: the torch-free API dispatches on the device.
#include "minifloat/quantize.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/kernels.h"
#include "ops/ops.h"
#include "ops/outputs.h"
#include "ops/tangents.h"

namespace minifloat {
namespace {

using at::Tensor;
using c10::SymInt;
using torch_ops::advise_huge_pages;
using torch_ops::empty;
using torch_ops::QuantizedOperand;
using torch_ops::scale_dtype;
using EightTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The sizes of an operand as read. batch: none for a matrix.
struct AsRead {
  std::optional<SymInt> batch;
  SymInt rows, cols;

  AsRead(const Tensor& x, bool columnwise)
      : rows(x.sym_size(columnwise ? -1 : -2)), cols(x.sym_size(columnwise ? -2 : -1)) {
    if (x.dim() == 3) batch = x.sym_size(0);
  }
  c10::SymDimVector shape(std::initializer_list<SymInt> inner) const {
    c10::SymDimVector sizes;
    if (batch) sizes.push_back(*batch);
    for (const SymInt& n : inner) sizes.push_back(n);
    return sizes;
  }
};

Tensor empty_amax(const Tensor& x, const Spec& spec, const AsRead& read) {
  if (spec.has_tensor_amax()) return empty(x, read.shape({}), at::kFloat);
  if (spec.has_row_amax()) return empty(x, read.shape({read.rows}), at::kFloat);
  return empty(x, {SymInt(0)}, at::kFloat);
}

QuantizedOperand allocate(const Tensor& x, const Spec& spec, const AsRead& read, bool decoded) {
  QuantizedOperand out;
  out.codes = empty(x, read.shape({read.rows, spec.code_cols(read.cols)}), at::kByte);
  const at::ScalarType dtype = scale_dtype(spec);
  if (spec.has_blocks())
    out.scale =
        empty(x, read.shape({spec.scale_rows(read.rows), spec.scale_cols(read.cols)}), dtype);
  else
    out.scale = empty_amax(x, spec, read);
  out.amax = empty_amax(x, spec, read);
  out.decoded = decoded
                    ? empty(x, read.shape({read.rows, spec.padded_cols(read.cols)}), at::kBFloat16)
                    : empty(x, {SymInt(0)}, at::kBFloat16);
  return out;
}

// Allocates the outputs of a direction as one allocation. Absent outputs are undefined. For direct
// calls alone: the outputs of an op do not share memory.
QuantizedOperand allocate_together(const Tensor& x, const Spec& spec, bool columnwise,
                                   bool decoded) {
  using torch_ops::direct_view;
  constexpr std::int64_t kAlignment = 256;  // bytes, as CUDA's own allocations
  const bool batched = x.dim() == 3;
  const std::int64_t batch = batched ? x.size(0) : 1, rows = x.size(columnwise ? -1 : -2),
                     cols = x.size(columnwise ? -2 : -1);
  struct Part {
    at::ScalarType dtype;
    c10::SmallVector<std::int64_t, 3> shape;
    std::int64_t begin;  // bytes
  };
  std::int64_t end = 0;
  const auto part = [&](at::ScalarType dtype, std::initializer_list<std::int64_t> inner) {
    Part p{dtype, {}, (end + kAlignment - 1) / kAlignment * kAlignment};
    std::int64_t bytes = batch * static_cast<std::int64_t>(c10::elementSize(dtype));
    if (batched) p.shape.push_back(batch);
    for (const std::int64_t n : inner) p.shape.push_back(n), bytes *= n;
    end = p.begin + bytes;
    return p;
  };
  const auto amax = [&] {
    return spec.has_row_amax() ? part(at::kFloat, {rows}) : part(at::kFloat, {});
  };
  const bool has_amax = spec.has_row_amax() || spec.has_tensor_amax();
  const Part codes = part(at::kByte, {rows, spec.code_cols(cols)});
  const Part scale = spec.has_blocks()
                         ? part(scale_dtype(spec), {spec.scale_rows(rows), spec.scale_cols(cols)})
                         : amax();
  const std::optional<Part> amax_part = has_amax ? std::optional(amax()) : std::nullopt;
  const std::optional<Part> values =
      decoded ? std::optional(part(at::kBFloat16, {rows, spec.padded_cols(cols)})) : std::nullopt;

  const Tensor memory = torch_ops::direct_empty(x, {end}, at::kByte);
  if (x.is_cpu()) advise_huge_pages(memory);
  const auto tensor = [&](const Part& p) {
    return direct_view(memory, p.dtype, p.shape,
                       p.begin / static_cast<std::int64_t>(c10::elementSize(p.dtype)));
  };
  return {tensor(codes), tensor(scale), amax_part ? tensor(*amax_part) : Tensor(),
          values ? tensor(*values) : Tensor()};
}

QuantizedOperand absent(const Tensor& x) {
  const auto none = [&](at::ScalarType dtype) { return empty(x, {SymInt(0)}, dtype); };
  return {none(at::kByte), none(at::kFloat), none(at::kFloat), none(at::kBFloat16)};
}

// The arguments of the op for one direction.
struct DirectionArguments {
  bool columnwise;
  std::optional<Spec> spec;                  // none: absent
  const std::optional<Tensor>& active_amax;  // none: computed from x
  std::int64_t stream;
  bool decoded;
};

DirectionArguments direction_arguments(bool columnwise, const std::string& text,
                                       const std::optional<Tensor>& amax, std::int64_t stream,
                                       bool decoded) {
  DirectionArguments d{columnwise, std::nullopt, amax, stream, decoded};
  if (text.empty()) return d;
  d.spec = bridge::parse_spec(text);
  TORCH_CHECK_VALUE(!d.spec->is_bf16(),
                    "quantize: bf16 is the identity and has no codes; expected a quantizing spec");
  return d;
}

void check_direction(const Tensor& x, const DirectionArguments& d,
                     const std::optional<Tensor>& rng) {
  if (d.spec && d.spec->stochastic)
    TORCH_CHECK_VALUE(rng.has_value(), "quantize: ", d.spec->str(),
                      " rounds stochastically and needs rng, an int64 tensor (seed, count)");
  if (!d.active_amax) return;
  TORCH_CHECK_VALUE(d.spec.has_value(), "quantize: expected no amax of a direction without a spec");
  const AsRead read(x, d.columnwise);
  const bool takes_amax = d.spec->has_tensor_amax() || d.spec->has_row_amax();
  TORCH_CHECK_VALUE(takes_amax, "quantize: ", d.spec->str(),
                    " has no tensor or row amax; expected no amax");
  const auto shape = d.spec->has_row_amax() ? read.shape({read.rows}) : read.shape({});
  TORCH_CHECK_VALUE(d.active_amax->scalar_type() == at::kFloat &&
                        d.active_amax->sym_sizes().equals(c10::SymIntArrayRef(shape)),
                    "quantize: expected amax as float32 ", c10::SymIntArrayRef(shape), ", got ",
                    d.active_amax->scalar_type(), " ", d.active_amax->sym_sizes());
  TORCH_CHECK_VALUE(d.active_amax->device() == x.device(), "quantize: expected amax on ",
                    x.device(), ", got ", d.active_amax->device());
}

// Checks the arguments of quantize: in the Meta kernel, the kernel and direct calls.
void check_arguments(const Tensor& x, const DirectionArguments& row, const DirectionArguments& col,
                     const std::optional<Tensor>& rng, std::size_t origin_size,
                     const std::optional<Tensor>& offs) {
  TORCH_CHECK_VALUE(!offs, "quantize: groups (offs) are not supported on ", x.device().type(),
                    " yet; expected offs=None");
  TORCH_CHECK_VALUE(origin_size == 2, "quantize: expected origin as (row, column), got ",
                    origin_size, " numbers");
  if (rng) bridge::check_rng("quantize", *rng, x);
  check_direction(x, row, rng);
  check_direction(x, col, rng);
}

QuantizedOperand allocate_direction(const Tensor& x, const DirectionArguments& d) {
  return d.spec ? allocate(x, *d.spec, AsRead(x, d.columnwise), d.decoded) : absent(x);
}

EightTensors eight(const QuantizedOperand& row, const QuantizedOperand& col) {
  return {row.codes, row.scale, row.amax, row.decoded, col.codes, col.scale, col.amax, col.decoded};
}

EightTensors quantize_meta(const Tensor& x, const std::string& row, const std::string& col,
                           const std::optional<Tensor>& amax_row,
                           const std::optional<Tensor>& amax_col, const std::optional<Tensor>& rng,
                           std::int64_t stream_row, std::int64_t stream_col,
                           c10::SymIntArrayRef origin, const std::optional<Tensor>& offs,
                           bool decoded_row, bool decoded_col) {
  bridge::check_values("quantize", x);
  const DirectionArguments r = direction_arguments(false, row, amax_row, stream_row, decoded_row);
  const DirectionArguments c = direction_arguments(true, col, amax_col, stream_col, decoded_col);
  check_arguments(x, r, c, rng, origin.size(), offs);
  return eight(allocate_direction(x, r), allocate_direction(x, c));
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

void fill_operand(OperandHolder& holder, const DirectionArguments& d, const QuantizedOperand& out,
                  const std::optional<Tensor>& rng, c10::IntArrayRef origin) {
  Operand& o = holder.operand;
  o.spec = *d.spec;
  if (d.active_amax) {
    bridge::check_memory("quantize", "amax", *d.active_amax);
    holder.amax = d.active_amax->contiguous();
    o.given_amax = holder.amax.const_data_ptr<float>();
  }
  if (d.spec->stochastic)
    o.random = {rng->const_data_ptr<std::int64_t>(), static_cast<int>(rng->size(0)),
                static_cast<std::uint64_t>(d.stream)};
  o.origin = d.columnwise ? Origin{origin[1], origin[0]} : Origin{origin[0], origin[1]};
  o.codes = data_or_null<std::uint8_t>(out.codes);
  o.scale = data_or_null<void>(out.scale);
  o.amax = data_or_null<float>(out.amax);
  o.decoded = data_or_null<std::uint16_t>(out.decoded);
}

// Quantizes into the outputs of the directions that have a spec.
void fill(const TensorRef& in, const DirectionArguments& r, const QuantizedOperand& out_row,
          const DirectionArguments& c, const QuantizedOperand& out_col,
          const std::optional<Tensor>& rng, c10::IntArrayRef origin, const Execution& execution) {
  if (rng) bridge::check_memory("quantize", "rng", *rng);
  const std::optional<Tensor> random = rng ? std::optional(rng->contiguous()) : std::nullopt;
  OperandHolder row, col;
  if (r.spec) fill_operand(row, r, out_row, random, origin);
  if (c.spec) fill_operand(col, c, out_col, random, origin);
  bridge::with_value_errors([&] {
    quantize(in, r.spec ? &row.operand : nullptr, c.spec ? &col.operand : nullptr, execution);
  });
}

EightTensors quantize_kernel(const Tensor& x, const std::string& row, const std::string& col,
                             const std::optional<Tensor>& amax_row,
                             const std::optional<Tensor>& amax_col,
                             const std::optional<Tensor>& rng, std::int64_t stream_row,
                             std::int64_t stream_col, c10::SymIntArrayRef sym_origin,
                             const std::optional<Tensor>& offs, bool decoded_row,
                             bool decoded_col) {
  const TensorRef in = bridge::tensor_ref("quantize", x);
  const DirectionArguments r = direction_arguments(false, row, amax_row, stream_row, decoded_row);
  const DirectionArguments c = direction_arguments(true, col, amax_col, stream_col, decoded_col);
  check_arguments(x, r, c, rng, sym_origin.size(), offs);
  const QuantizedOperand out_row = allocate_direction(x, r), out_col = allocate_direction(x, c);
  fill(in, r, out_row, c, out_col, rng, C10_AS_INTARRAYREF_SLOW(sym_origin),
       bridge::ExecutionOn(x));
  return eight(out_row, out_col);
}

Tensor amax_meta(const Tensor& x, const std::string& text, bool columnwise) {
  bridge::check_values("amax", x);
  const Spec spec = bridge::parse_spec(text);
  TORCH_CHECK_VALUE(spec.has_tensor_amax() || spec.has_row_amax(), "amax: ", spec.str(),
                    " has no tensor or row amax; expected tensor, row or nvfp4 scaling");
  return empty_amax(x, spec, AsRead(x, columnwise));
}

Tensor amax_kernel(const Tensor& x, const std::string& text, bool columnwise) {
  const TensorRef in = bridge::tensor_ref("amax", x);
  const Tensor out = amax_meta(x, text, columnwise);
  bridge::with_value_errors([&] {
    amax(in, bridge::parse_spec(text), columnwise, out.mutable_data_ptr<float>(),
         bridge::ExecutionOn(x));
  });
  return out;
}

}  // namespace

namespace torch_ops {

std::pair<QuantizedOperand, QuantizedOperand> direct_quantize(const Tensor& x,
                                                              const std::string& row,
                                                              const std::string& col,
                                                              const QuantizeOptions& options) {
  const TensorRef in = bridge::tensor_ref("quantize", x);
  const DirectionArguments r =
      direction_arguments(false, row, options.amax_row, options.stream_row, options.decoded_row);
  const DirectionArguments c =
      direction_arguments(true, col, options.amax_col, options.stream_col, options.decoded_col);
  const c10::IntArrayRef origin = C10_AS_INTARRAYREF_SLOW(options.origin);
  check_arguments(x, r, c, options.rng, origin.size(), std::nullopt);
  const bridge::ExecutionOn here(x);
  std::pair<QuantizedOperand, QuantizedOperand> out;
  if (r.spec) out.first = allocate_together(x, *r.spec, false, r.decoded);
  if (c.spec) out.second = allocate_together(x, *c.spec, true, c.decoded);
  fill(in, r, out.first, c, out.second, options.rng, origin, here);
  return out;
}

}  // namespace torch_ops

namespace {

void register_kernels(torch::Library& m) {
  m.impl("amax", amax_kernel);
  m.impl("quantize", quantize_kernel);
}

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(minifloat, CUDA, m) { register_kernels(m); }

TORCH_LIBRARY_IMPL(minifloat, Meta, m) {
  m.impl("amax", amax_meta);
  m.impl("quantize", quantize_meta);
}

// Codes have no derivative. layers/linear.cpp has the derivatives of layers.
TORCH_LIBRARY_IMPL(minifloat, Autograd, m) {
  for (const char* op : {"amax", "quantize"}) m.impl(op, torch_ops::without_derivative());
}

}  // namespace minifloat
