// The ops that read codes. dequantize: codes to values. decode: codes to the bf16 values of an
// exact product. fp4_as_fp8: FP4 codes to FP8 codes of the same values.
#include <ATen/ATen.h>

#include "minifloat/quantize.h"
#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/kernels.h"
#include "ops/op.h"
#include "ops/ops.h"
#include "ops/outputs.h"

namespace minifloat {
namespace {

using at::Tensor;
using c10::SymInt;
using torch_ops::empty;
using torch_ops::is_scale_dtype;
using torch_ops::scale_dtype;
using torch_ops::scales_of;

// Requires codes (…, rows, code_cols) of an operand that is (rows, cols) as read.
void check_codes(const char* op, const Tensor& codes, const Tensor& scale, const Tensor& amax,
                 const Spec& spec, const SymInt& cols, const torch_ops::Groups& groups) {
  TORCH_CHECK_VALUE(!spec.is_bf16(), op, ": bf16 is the identity and has no codes");
  TORCH_CHECK_VALUE(codes.scalar_type() == at::kByte && (codes.dim() == 2 || codes.dim() == 3), op,
                    ": expected uint8 codes of 2 or 3 dimensions, got ", codes.scalar_type(),
                    " of ", codes.dim());
  bridge::check_sizes(op, "codes", codes);
  bridge::check_size(op, "cols", cols);
  bridge::check_same_device(op, "scale", scale, codes);
  bridge::check_same_device(op, "amax", amax, codes);
  TORCH_CHECK_VALUE(codes.sym_size(-1) == spec.code_cols(cols), op, ": expected ",
                    spec.code_cols(cols), " code bytes a row for ", cols, " columns under ",
                    spec.str(), ", got ", codes.sym_size(-1));
  torch_ops::check_groups(op, groups, codes);
}

// Returns memory for the values of codes, after check_codes.
Tensor empty_values(const char* op, const Tensor& codes, const Tensor& scale, const Tensor& amax,
                    const Spec& spec, const SymInt& cols, const torch_ops::Groups& groups,
                    at::ScalarType dtype) {
  check_codes(op, codes, scale, amax, spec, cols, groups);
  c10::SymDimVector shape(codes.sym_sizes().begin(), codes.sym_sizes().end());
  shape.back() = spec.padded_cols(cols);
  return empty(codes, shape, dtype);
}

// A torch-free view of (codes, scale, amax). It points to a contiguous copy of amax, which it owns.
struct View {
  Quantized q;
  Tensor amax;
};

// Returns the number of scales of an operand.
std::int64_t scale_count(const Quantized& q) {
  if (q.groups && !q.spec.has_blocks() && (q.groups.unit > 0 || !q.spec.has_row_amax()))
    return q.groups.count * (q.spec.has_row_amax() ? q.rows : 1);
  return q.batch * scales_of(q.spec, q.rows, q.cols);
}

// Returns the view, after its checks. amax: undefined where the op takes none.
View quantized_view(const char* op, const Spec& spec, const Tensor& codes, const Tensor& scale,
                    const Tensor& amax, std::int64_t cols, const torch_ops::Groups& groups) {
  bridge::check_memory(op, "codes", codes);
  bridge::check_memory(op, "scale", scale);
  bridge::check_memory(op, "amax", amax);
  TORCH_CHECK_VALUE(codes.is_contiguous() && scale.is_contiguous(), op,
                    ": expected contiguous codes and scale, got strides ", codes.strides(), " and ",
                    scale.strides());
  View view;
  Quantized& q = view.q;
  q.spec = spec;
  q.device = bridge::backend_of(codes);
  q.codes = codes.const_data_ptr<std::uint8_t>();
  q.scale = scale.const_data_ptr();
  q.batch = codes.dim() == 3 ? codes.size(0) : 1;
  q.rows = codes.size(-2);
  q.cols = cols;
  q.groups = torch_ops::group_table_of(op, groups, groups.unit);
  const std::int64_t scales = scale_count(q);
  TORCH_CHECK_VALUE(is_scale_dtype(scale.scalar_type(), spec) && scale.numel() == scales, op,
                    ": expected ", scales, " scales of ", scale_dtype(spec), " for ", spec.str(),
                    ", got ", scale.numel(), " of ", scale.scalar_type());
  if (spec.has_outer_amax() && amax.defined()) {
    TORCH_CHECK_VALUE(amax.scalar_type() == at::kFloat && amax.numel() == q.factors(), op,
                      ": expected ", q.factors(), " float32 amaxes, one a ",
                      spec.has_row_amax() ? "row" : "matrix or group", ", got ", amax.numel(),
                      " of ", amax.scalar_type());
    view.amax = amax.contiguous();
    q.amax = view.amax.const_data_ptr<float>();
  }
  return view;
}

Tensor dequantize_kernel(const Tensor& codes, const Tensor& scale, const Tensor& amax,
                         const std::string& text, SymInt cols, at::ScalarType dtype,
                         const std::optional<Tensor>& groups, std::int64_t unit) {
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16,
                    "dequantize: expected dtype float32 or bfloat16, got ", dtype);
  const Spec& spec = bridge::parse_spec(text);
  const torch_ops::Groups all = {groups, unit};
  const Tensor out = empty_values("dequantize", codes, scale, amax, spec, cols, all, dtype);
  if (out.is_meta()) return out;
  const View view = quantized_view("dequantize", spec, codes, scale, amax,
                                   cols.guard_int(__FILE__, __LINE__), all);
  const DType to = dtype == at::kFloat ? DType::kFloat32 : DType::kBFloat16;
  bridge::with_value_errors(
      [&] { dequantize(view.q, to, out.mutable_data_ptr(), bridge::ExecutionOn(codes)); });
  return out;
}

Tensor empty_decoded(const Tensor& codes, const Tensor& scale, const Spec& spec, const SymInt& cols,
                     const torch_ops::Groups& groups) {
  return empty_values("decode", codes, scale, Tensor(), spec, cols, groups,
                      spec.has_fp32_values() ? at::kFloat : at::kBFloat16);
}

Tensor decode_kernel(const Tensor& codes, const Tensor& scale, const std::string& text, SymInt cols,
                     const std::optional<Tensor>& table, std::int64_t unit) {
  const Spec& spec = bridge::parse_spec(text);
  const torch_ops::Groups groups = {table, unit};
  if (codes.is_meta()) return empty_decoded(codes, scale, spec, cols, groups);
  return torch_ops::direct_decode(codes, scale, spec, cols.guard_int(__FILE__, __LINE__), groups);
}

void check_is_fp4_by_powers_of_two(const Spec& spec) {
  TORCH_CHECK_VALUE(spec.is_fp4_by_powers_of_two(),
                    "fp4_as_fp8: expected 4-bit codes under powers of two (mxfp4, nvfp4+pow2, "
                    "e1m2/1x32 or e1m2/1x16+pow2), got ",
                    spec.str());
}

// Returns the shape of the row scales: one a row, or a row of a group.
c10::SymDimVector row_scale_shape(const Tensor& codes, const torch_ops::Groups& groups) {
  const auto rows = codes.sym_sizes().slice(0, codes.dim() - 1);
  c10::SymDimVector shape(rows.begin(), rows.end());
  if (groups.unit > 0) shape.insert(shape.begin(), groups.count());
  return shape;
}

Fp4AsFp8Cast fp4_as_fp8_cast(const Quantized& q, const Tensor& fp8_codes, const Tensor& row_scale) {
  return {q, static_cast<std::uint8_t*>(fp8_codes.mutable_data_ptr()),
          row_scale.mutable_data_ptr<float>()};
}

void write_fp8_rows(std::span<const Fp4AsFp8Cast> operands, const Tensor& like) {
  const bridge::ExecutionOn here(like);
  bridge::with_value_errors([&] { fp4_as_fp8(operands, here); });
}

std::tuple<Tensor, Tensor> fp4_as_fp8_kernel(const Tensor& codes, const Tensor& scale,
                                             const Tensor& amax, const std::string& text,
                                             SymInt cols, const std::optional<Tensor>& groups,
                                             std::int64_t unit) {
  const Spec& spec = bridge::parse_spec(text);
  const torch_ops::Groups all = {groups, unit};
  check_is_fp4_by_powers_of_two(spec);
  const Tensor fp8_codes =
      empty_values("fp4_as_fp8", codes, scale, amax, spec, cols, all, at::kFloat8_e4m3fn);
  const Tensor row_scale = empty(codes, row_scale_shape(codes, all), at::kFloat);
  if (fp8_codes.is_meta()) return {fp8_codes, row_scale};
  const View view = quantized_view("fp4_as_fp8", spec, codes, scale, amax,
                                   cols.guard_int(__FILE__, __LINE__), all);
  const Fp4AsFp8Cast cast = fp4_as_fp8_cast(view.q, fp8_codes, row_scale);
  write_fp8_rows({&cast, 1}, codes);
  return {fp8_codes, row_scale};
}

// Codes have no gradient.
const torch_ops::Op dequantize_op("dequantize", dequantize_kernel, torch_ops::skipped());
const torch_ops::Op decode_op("decode", decode_kernel, torch_ops::skipped());
const torch_ops::Op fp4_as_fp8_op("fp4_as_fp8", fp4_as_fp8_kernel, torch_ops::skipped());

}  // namespace

namespace torch_ops {

Tensor direct_decode(const Tensor& codes, const Tensor& scale, const Spec& spec, std::int64_t cols,
                     const torch_ops::Groups& groups) {
  const Tensor out = empty_decoded(codes, scale, spec, cols, groups);
  const View view = quantized_view("decode", spec, codes, scale, Tensor(), cols, groups);
  bridge::with_value_errors([&] {
    const bridge::ExecutionOn here(codes);
    if (spec.has_fp32_values())
      dequantize(view.q, DType::kFloat32, out.mutable_data_ptr(), here);
    else
      decode_for_product(view.q, static_cast<std::uint16_t*>(out.mutable_data_ptr()), here);
  });
  return out;
}

namespace {

// An operand as the native library reads it, and its uninitialized rows in one allocation.
struct PlannedRows {
  View view;
  Fp8Rows rows;
};
PlannedRows plan_rows(const Fp4Operand& operand, std::int64_t cols) {
  const auto& [spec, codes, scale, amax, groups] = operand;
  check_is_fp4_by_powers_of_two(spec);
  check_codes("fp4_as_fp8", codes, scale, amax, spec, cols, groups);
  PlannedRows out = {quantized_view("fp4_as_fp8", spec, codes, scale, amax, cols, groups), {}};
  constexpr std::int64_t kAlignment = 256;  // bytes, as CUDA's own allocations
  const auto shape = codes.sizes();
  c10::SmallVector<std::int64_t, 3> values(shape.begin(), shape.end());
  values.back() = spec.padded_cols(cols);
  const c10::SymDimVector scale_shape = row_scale_shape(codes, groups);
  const c10::IntArrayRef scales = C10_AS_INTARRAYREF_SLOW(scale_shape);
  const std::int64_t rows = out.view.q.batch * out.view.q.rows,
                     begin = (rows * values.back() + kAlignment - 1) / kAlignment * kAlignment;
  const auto bytes =
      begin + c10::multiply_integers(scales) * static_cast<std::int64_t>(sizeof(float));
  const Tensor memory = direct_empty(codes, {bytes}, at::kByte);
  if (codes.is_cpu()) advise_huge_pages(memory);
  out.rows = {
      direct_view(memory, at::kFloat8_e4m3fn, values),
      direct_view(memory, at::kFloat, scales, begin / static_cast<std::int64_t>(sizeof(float)))};
  return out;
}

Fp4AsFp8Cast cast_of(const PlannedRows& p) {
  return fp4_as_fp8_cast(p.view.q, p.rows.first, p.rows.second);
}

}  // namespace

Fp8Rows direct_fp4_as_fp8(const Fp4Operand& operand, std::int64_t cols) {
  const PlannedRows p = plan_rows(operand, cols);
  const Fp4AsFp8Cast cast = cast_of(p);
  write_fp8_rows({&cast, 1}, operand.codes);
  return p.rows;
}

std::pair<Fp8Rows, Fp8Rows> direct_fp4_as_fp8(const Fp4Operand& a, const Fp4Operand& b,
                                              std::int64_t cols) {
  const PlannedRows left = plan_rows(a, cols), right = plan_rows(b, cols);
  const Fp4AsFp8Cast casts[] = {cast_of(left), cast_of(right)};
  write_fp8_rows(casts, a.codes);
  return {left.rows, right.rows};
}

Tensor dequantize(const QuantizedOperand& q, const std::string& spec, const SymInt& cols,
                  at::ScalarType dtype, const std::optional<Tensor>& groups) {
  return dequantize_op(q.codes, q.scale, q.amax, spec, cols, dtype, groups, 0);
}

Tensor decode(const Tensor& codes, const Tensor& scale, const Spec& spec, SymInt cols,
              const Groups& groups) {
  const auto length = cols.maybe_as_int();
  if (length && can_skip_dispatcher({&codes, &scale, or_null(groups.table)}))
    return direct_decode(codes, scale, spec, *length, groups);
  return decode_op(codes, scale, spec.str(), std::move(cols), groups.table, groups.unit);
}

Fp8Rows fp4_as_fp8(const Tensor& codes, const Tensor& scale, const Tensor& amax, const Spec& spec,
                   SymInt cols, const Groups& groups) {
  const auto length = cols.maybe_as_int();
  if (length && can_skip_dispatcher({&codes, &scale, &amax, or_null(groups.table)}))
    return direct_fp4_as_fp8({spec, codes, scale, amax, groups}, *length);
  auto [fp8_codes, row_scale] = fp4_as_fp8_op(codes, scale, or_empty(&amax, codes), spec.str(),
                                              std::move(cols), groups.table, groups.unit);
  return {fp8_codes, row_scale};
}

}  // namespace torch_ops

}  // namespace minifloat
