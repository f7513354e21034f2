// The op amax: the largest magnitude of x, or of each of its rows, as a spec scales by.
#include "minifloat/quantize.h"
#include "ops/as_read.h"
#include "ops/bridge.h"
#include "ops/op.h"
#include "ops/ops.h"
#include "ops/outputs.h"

namespace minifloat {
namespace {

using at::Tensor;
using torch_ops::as_read;
using torch_ops::empty;

Tensor amax_kernel(const Tensor& x, const std::string& text, bool columnwise,
                   const std::optional<Tensor>& rng, std::int64_t stream,
                   const std::optional<Tensor>& table, const std::optional<Tensor>& rows_from) {
  const torch_ops::Groups groups = {table, 0, rows_from};
  bridge::check_values("amax", x);
  torch_ops::check_groups("amax", groups, x);
  TORCH_CHECK_VALUE(!table || x.dim() == 2, "amax: expected x (rows, cols) with groups, got ",
                    x.dim(), " dimensions");
  const Spec& spec = bridge::parse_spec(text);
  TORCH_CHECK_VALUE(spec.has_tensor_amax() || spec.has_row_amax(), "amax: ", spec.str(),
                    " has no tensor or row amax; expected tensor, row or nvfp4 scaling");
  if (rng) bridge::check_rng("amax", *rng, x);
  TORCH_CHECK_VALUE(!spec.is_eden() || rng, "amax: ", spec.str(),
                    " draws the signs of its transform and needs rng, an int64 tensor (seed, "
                    "count)");
  const Tensor out = empty(x, as_read(x, spec, columnwise, groups).amax(spec), at::kFloat);
  if (out.is_meta()) return out;
  TensorRef in = bridge::tensor_ref("amax", x);
  AmaxOf of = {spec, columnwise};
  torch_ops::set_groups("amax", groups, spec.group_unit(), in);
  Tensor state;
  if (rng) bridge::check_memory("amax", "rng", *rng);
  if (spec.is_eden()) {
    state = rng->contiguous();
    of.random = {state.const_data_ptr<std::int64_t>(), static_cast<int>(state.size(0)),
                 static_cast<std::uint64_t>(stream)};
  }
  bridge::with_value_errors(
      [&] { amax(in, of, out.mutable_data_ptr<float>(), bridge::ExecutionOn(x)); });
  return out;
}

// A maximum has no derivative. layers/linear.cpp has the derivatives of layers.
const torch_ops::Op amax_op("amax", amax_kernel, torch_ops::without_derivative());

}  // namespace

Tensor torch_ops::amax(const Tensor& x, const std::string& spec, bool columnwise,
                       const QuantizeOptions& options) {
  return amax_op(x, spec, columnwise, options.rng,
                 columnwise ? options.stream_col : options.stream_row, options.groups.table,
                 options.groups.rows_from);
}

}  // namespace minifloat
