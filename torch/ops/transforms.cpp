// The ops hadamard, swizzle_scales, unswizzle_scales and transpose_codes.
#include "minifloat/transform.h"

#include <ATen/ATen.h>

#include "minifloat/core/hadamard.h"
#include "minifloat/core/swizzle.h"
#include "ops/bridge.h"
#include "ops/groups.h"
#include "ops/op.h"
#include "ops/ops.h"

namespace minifloat {
namespace {

using at::Tensor;
using c10::SymInt;

Tensor hadamard_kernel(const Tensor& x, std::int64_t points, bool columnwise, std::int64_t signs,
                       const std::optional<Tensor>& table, std::int64_t unit) {
  const torch_ops::Groups groups = {table, unit};
  bridge::check_values("hadamard", x);
  TORCH_CHECK_VALUE(points == 16 || points == 32 || points == 64 || points == 128,
                    "hadamard: expected 16, 32, 64 or 128 points, got ", points);
  TORCH_CHECK_VALUE(0 <= signs && signs <= 0xFFFF, "hadamard: expected a 16-bit sign mask, got ",
                    signs);
  torch_ops::check_groups("hadamard", groups, x);
  TORCH_CHECK_VALUE(!table || x.dim() == 2, "hadamard: expected x (rows, cols) with groups, got ",
                    x.dim(), " dimensions");
  const std::int64_t unit_of_columns = std::max(points, unit);  // of groups, where columnwise
  c10::SymDimVector shape(x.sym_sizes().begin(), x.sym_sizes().end());
  if (columnwise) std::swap(shape[shape.size() - 1], shape[shape.size() - 2]);
  shape.back() = table && columnwise
                     ? grouped_cols<SymInt>(shape.back(), SymInt(unit_of_columns), groups.count())
                     : round_up<SymInt>(shape.back(), SymInt(points));
  const Tensor out = at::empty_symint(shape, x.options().dtype(at::kBFloat16));
  if (out.is_meta()) return out;
  TensorRef in = bridge::tensor_ref("hadamard", x);
  in.groups = torch_ops::group_table_of("hadamard", groups, unit_of_columns);
  bridge::with_value_errors([&] {
    hadamard(in, static_cast<int>(points), columnwise, static_cast<std::uint32_t>(signs),
             static_cast<std::uint16_t*>(out.mutable_data_ptr()), bridge::ExecutionOn(x));
  });
  return out;
}

ScaleGroups parse_groups(const std::string& text, const std::optional<Tensor>& offs,
                         const Tensor& scale) {
  TORCH_CHECK_VALUE(text.empty() || text == "m" || text == "k",
                    "swizzle_scales: expected groups 'm', 'k' or '', got '", printable(text), "'");
  TORCH_CHECK_VALUE(text.empty() == !offs,
                    "swizzle_scales: offs and groups go together, got groups='", printable(text),
                    "' and ", offs ? "offs" : "no offs");
  if (offs)
    TORCH_CHECK_VALUE(offs->scalar_type() == at::kInt && offs->dim() == 1,
                      "swizzle_scales: expected offs as int32 (groups), got ", offs->scalar_type(),
                      " of ", offs->dim(), " dimensions");
  if (offs) bridge::check_sizes("swizzle_scales", "offs", *offs);
  if (offs) bridge::check_same_device("swizzle_scales", "offs", *offs, scale);
  return text.empty()  ? ScaleGroups::kNone
         : text == "m" ? ScaleGroups::kAlongM
                       : ScaleGroups::kAlongK;
}

void check_scale_dtype(const char* op, const Tensor& scale) {
  const at::ScalarType dtype = scale.scalar_type();
  TORCH_CHECK_VALUE(
      dtype == at::kByte || dtype == at::kFloat8_e8m0fnu || dtype == at::kFloat8_e4m3fn, op,
      ": expected one-byte scales, E8M0 or E4M3 or their bytes as uint8, got ", dtype);
}

void check_scale(const Tensor& scale, ScaleGroups groups) {
  check_scale_dtype("swizzle_scales", scale);
  bridge::check_sizes("swizzle_scales", "scale", scale);
  TORCH_CHECK_VALUE(
      scale.dim() == 2 || (scale.dim() == 3 && groups == ScaleGroups::kNone),
      "swizzle_scales: expected (rows, cols), or (batch, rows, cols) without groups, got ",
      scale.dim(), " dimensions");
}

// Returns (padded rows, padded cols), or with a batch (batch, bytes).
c10::SymDimVector swizzled_shape(const std::optional<SymInt>& batch, const SymInt& rows,
                                 const SymInt& cols, ScaleGroups groups, const SymInt& count) {
  const SymInt tile_rows(kSwizzleTileRows), tile_cols(kSwizzleTileCols);
  const SymInt padded_rows =
      groups == ScaleGroups::kAlongM ? rows + tile_rows * count : round_up<SymInt>(rows, tile_rows);
  const SymInt padded_cols =
      groups == ScaleGroups::kAlongK ? cols + tile_cols * count : round_up<SymInt>(cols, tile_cols);
  if (batch) return {*batch, padded_rows * padded_cols};
  return {padded_rows, padded_cols};
}

// Describes scales on the device of `like`. offs: contiguous group boundaries; undefined: no
// groups.
ScaleMatrix matrix(std::int64_t batch, std::int64_t rows, std::int64_t cols, ScaleGroups groups,
                   const Tensor& offs, const Tensor& like) {
  ScaleMatrix m;
  m.device = bridge::backend_of(like);
  m.batch = batch;
  m.rows = rows;
  m.cols = cols;
  m.kind = groups;
  if (offs.defined()) {
    m.offsets = offs.const_data_ptr<std::int32_t>();
    m.groups = offs.size(0);
  }
  return m;
}

Tensor swizzle_kernel(const Tensor& scale, const std::optional<Tensor>& offs,
                      const std::string& text) {
  const ScaleGroups groups = parse_groups(text, offs, scale);
  check_scale(scale, groups);
  const auto batch = scale.dim() == 3 ? std::optional(scale.sym_size(0)) : std::nullopt;
  const Tensor out = at::empty_symint(swizzled_shape(batch, scale.sym_size(-2), scale.sym_size(-1),
                                                     groups, offs ? offs->sym_size(0) : SymInt(0)),
                                      scale.options());
  if (out.is_meta()) return out;
  TORCH_CHECK_VALUE(scale.is_contiguous(),
                    "swizzle_scales: expected contiguous scales, got strides ", scale.strides());
  bridge::check_memory("swizzle_scales", "scale", scale);
  if (offs) bridge::check_memory("swizzle_scales", "offs", *offs);
  const Tensor offsets = offs ? offs->contiguous() : Tensor();
  bridge::with_value_errors([&] {
    swizzle_scales(matrix(scale.dim() == 3 ? scale.size(0) : 1, scale.size(-2), scale.size(-1),
                          groups, offsets, scale),
                   static_cast<const std::uint8_t*>(scale.const_data_ptr()),
                   static_cast<std::uint8_t*>(out.mutable_data_ptr()), bridge::ExecutionOn(scale));
  });
  return out;
}

Tensor unswizzle_kernel(const Tensor& swizzled, SymInt rows, SymInt cols,
                        const std::optional<Tensor>& offs, const std::string& text) {
  const ScaleGroups groups = parse_groups(text, offs, swizzled);
  check_scale_dtype("unswizzle_scales", swizzled);
  bridge::check_size("unswizzle_scales", "rows", rows);
  bridge::check_size("unswizzle_scales", "cols", cols);
  TORCH_CHECK_VALUE(swizzled.dim() == 2,
                    "unswizzle_scales: expected scales as swizzle_scales gives them, got ",
                    swizzled.dim(), " dimensions");
  const auto height = rows.maybe_as_int(), width = cols.maybe_as_int();
  TORCH_CHECK_VALUE(!height || !width || is_addressable({*height, *width}),
                    "unswizzle_scales: expected at most 2^48 scales, got ", rows, " x ", cols);
  const SymInt count = offs ? offs->sym_size(0) : SymInt(0);
  const auto dense = swizzled_shape(std::nullopt, rows, cols, groups, count);
  const bool is_dense = swizzled.sym_sizes().equals(c10::SymIntArrayRef(dense));
  const auto batched = swizzled_shape(swizzled.sym_size(0), rows, cols, groups, count);
  TORCH_CHECK_VALUE(is_dense || (groups == ScaleGroups::kNone &&
                                 swizzled.sym_sizes().equals(c10::SymIntArrayRef(batched))),
                    "unswizzle_scales: expected ", c10::SymIntArrayRef(dense), " or ",
                    c10::SymIntArrayRef(batched), " for ", rows, " x ", cols, " scales, got ",
                    swizzled.sym_sizes());
  const c10::SymDimVector shape = is_dense ? c10::SymDimVector{rows, cols}
                                           : c10::SymDimVector{swizzled.sym_size(0), rows, cols};
  const Tensor out = at::empty_symint(shape, swizzled.options());
  if (out.is_meta()) return out;
  TORCH_CHECK_VALUE(swizzled.is_contiguous(),
                    "unswizzle_scales: expected contiguous scales, got strides ",
                    swizzled.strides());
  bridge::check_memory("unswizzle_scales", "scales", swizzled);
  if (offs) bridge::check_memory("unswizzle_scales", "offs", *offs);
  const Tensor offsets = offs ? offs->contiguous() : Tensor();
  bridge::with_value_errors([&] {
    unswizzle_scales(matrix(out.dim() == 3 ? out.size(0) : 1, out.size(-2), out.size(-1), groups,
                            offsets, swizzled),
                     static_cast<const std::uint8_t*>(swizzled.const_data_ptr()),
                     static_cast<std::uint8_t*>(out.mutable_data_ptr()),
                     bridge::ExecutionOn(swizzled));
  });
  return out;
}

Tensor transpose_kernel(const Tensor& codes, SymInt cols) {
  TORCH_CHECK_VALUE(codes.scalar_type() == at::kByte && (codes.dim() == 2 || codes.dim() == 3),
                    "transpose_codes: expected packed uint8 codes of 2 or 3 dimensions, got ",
                    codes.scalar_type(), " of ", codes.dim());
  bridge::check_sizes("transpose_codes", "codes", codes);
  bridge::check_size("transpose_codes", "cols", cols);
  TORCH_CHECK_VALUE(codes.sym_size(-1) == ceil_div<SymInt>(cols, SymInt(2)),
                    "transpose_codes: expected ", ceil_div<SymInt>(cols, SymInt(2)),
                    " bytes a row for ", cols, " columns, got ", codes.sym_size(-1));
  c10::SymDimVector shape(codes.sym_sizes().begin(), codes.sym_sizes().end());
  shape[shape.size() - 2] = cols;
  shape.back() = ceil_div<SymInt>(codes.sym_size(-2), SymInt(2));
  const Tensor out = at::empty_symint(shape, codes.options());
  if (out.is_meta()) return out;
  TORCH_CHECK_VALUE(codes.is_contiguous(),
                    "transpose_codes: expected contiguous codes, got strides ", codes.strides());
  bridge::check_memory("transpose_codes", "codes", codes);
  bridge::with_value_errors([&] {
    transpose_nibbles({.codes = codes.const_data_ptr<std::uint8_t>(),
                       .batch = codes.dim() == 3 ? codes.size(0) : 1,
                       .rows = codes.size(-2),
                       .cols = out.size(-2),
                       .device = bridge::backend_of(codes)},
                      out.mutable_data_ptr<std::uint8_t>(), bridge::ExecutionOn(codes));
  });
  return out;
}

// hadamard has no derivative of its own. Codes and scales have no gradient.
const torch_ops::Op hadamard_op("hadamard", hadamard_kernel, torch_ops::refused());
const torch_ops::Op swizzle_op("swizzle_scales", swizzle_kernel, torch_ops::skipped());
const torch_ops::Op unswizzle_op("unswizzle_scales", unswizzle_kernel, torch_ops::skipped());
const torch_ops::Op transpose_op("transpose_codes", transpose_kernel, torch_ops::skipped());

}  // namespace

Tensor torch_ops::hadamard(const Tensor& x, std::int64_t points, bool columnwise,
                           std::int64_t signs) {
  return hadamard_op(x, points, columnwise, signs, std::nullopt, 0);
}

// The transform multiplies by signs and then by a symmetric orthogonal matrix. Its kernels round to
// bf16; the sums here are theirs, in their order.
Tensor torch_ops::inverse_hadamard(const Tensor& rows, std::int64_t points) {
  const SymInt count = rows.sym_numel() / points;
  Tensor y = rows;
  for (std::int64_t stride = 1; stride < points; stride *= 2) {
    const Tensor pairs = y.reshape_symint({count, points / (2 * stride), 2, stride});
    const Tensor a = pairs.select(2, 0), b = pairs.select(2, 1);
    y = at::stack({a + b, a - b}, 2);
  }
  const Tensor bits = at::arange(points, rows.options().dtype(at::kLong)).remainder(16);
  const Tensor negated =
      at::bitwise_right_shift(
          at::full({points}, static_cast<std::int64_t>(kHadamardSigns), bits.options()), bits)
          .bitwise_and(1);
  const Tensor factors =
      at::rsub(negated * 2, 1).to(at::kFloat) * hadamard_norm(static_cast<int>(points));
  return (y.reshape_symint({count, points}) * factors).reshape_symint(rows.sym_sizes());
}

Tensor torch_ops::swizzle_scales(const Tensor& scale, const std::optional<Tensor>& offs,
                                 const std::string& groups) {
  return swizzle_op(scale, offs, groups);
}

Tensor torch_ops::unswizzle_scales(const Tensor& swizzled, const SymInt& rows, const SymInt& cols) {
  return unswizzle_op(swizzled, rows, cols, std::nullopt, "");
}

}  // namespace minifloat
