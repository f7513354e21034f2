#include "products/inputs.h"

#include <ATen/ATen.h>

#include "minifloat/core/swizzle.h"
#include "ops/as_read.h"
#include "ops/bridge.h"
#include "ops/ops.h"
#include "ops/outputs.h"
#include "products/tensor_factor.h"

namespace minifloat::torch_ops {
namespace {

using c10::SymInt;

// Requires `count` numbers of the expected dtype and shape: is_right. what: the scales, for errors.
void check_scale(const char* name, const Spec& spec, const Tensor& scale, bool is_right,
                 const SymInt& count, const char* what, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(scale.defined() && is_right && scale.sym_numel() == count,
                    "scaled_mm: expected ", count, what, dtype, " for ", name, " under ",
                    spec.str(), ", got ", scale.sym_numel(), " of ", scale.scalar_type());
}

// what: the numbers, for errors
void check_row_numbers(const char* name, const Spec& spec, const Tensor& of_rows,
                       const SymInt& rows, const InputSizes& sizes, const char* what) {
  const bool is_matrix = sizes.matrices || sizes.is_along_contraction;
  const bool is_right = of_rows.defined() && of_rows.scalar_type() == at::kFloat &&
                        of_rows.dim() == (is_matrix ? 2 : 1);
  check_scale(name, spec, of_rows, is_right, rows, what, at::kFloat);
}

// Returns the number of scales of a cast. rows: with those of every matrix
SymInt scale_count(const Spec& spec, const Tensor& codes, const SymInt& rows,
                   const InputSizes& sizes) {
  const SymInt parts = sizes.matrices.value_or(sizes.groups.value_or(SymInt(1)));
  if (spec.has_blocks())
    return sizes.matrices.value_or(SymInt(1)) * scales_of(spec, codes.sym_size(-2), sizes.k);
  return spec.has_row_amax() ? rows : parts;
}

void check_swizzled(const char* name, const Spec& spec, const Tensor& scale, const SymInt& rows,
                    const InputSizes& sizes) {
  const auto shape =
      AsRead<SymInt>{.batch = {}, .groups = {}, .rows = rows, .cols = sizes.k, .columnwise = false}
          .swizzled(spec);
  const bool is_right = spec.has_blocks() && spec.scale_bytes() == 1 && !sizes.matrices &&
                        !sizes.groups && is_scale_dtype(scale.scalar_type(), spec) &&
                        scale.is_contiguous();
  TORCH_CHECK_VALUE(is_right && scale.sym_sizes().equals(c10::SymIntArrayRef(shape)),
                    "scaled_mm: expected swizzled scales ", c10::SymIntArrayRef(shape), " of ",
                    name, " under ", spec.str(), ", which MX and NVFP4 have without groups, got ",
                    scale.scalar_type(), " ", scale.sym_sizes());
}

bool is_form_of(const Spec& spec, const ProductInput& input, at::ScalarType dtype) {
  if (std::holds_alternative<Codes>(input) || std::holds_alternative<SwizzledCodes>(input))
    return dtype == at::kByte;
  if (std::holds_alternative<Decoded>(input))
    return dtype == (spec.has_fp32_values() ? at::kFloat : at::kBFloat16);
  return dtype == at::kFloat8_e4m3fn && spec.is_fp4_by_powers_of_two();
}

}  // namespace

InputTensors tensors_of(const ProductInput& input) {
  struct Visitor {
    InputTensors operator()(const Values& v) { return {&v.values, nullptr, nullptr}; }
    InputTensors operator()(const Codes& c) { return {&c.codes, &c.scale, &c.amax}; }
    InputTensors operator()(const SwizzledCodes& c) { return {&c.codes, &c.scale, &c.amax}; }
    InputTensors operator()(const Decoded& d) { return {&d.values, &d.scale, &d.amax}; }
    InputTensors operator()(const Fp4AsFp8& f) { return {&f.codes, &f.row_scale, &f.amax}; }
  };
  return std::visit(Visitor(), input);
}

ProductInput input_of(const Spec& spec, const Tensor& elements, const Tensor& scale,
                      const Tensor& amax) {
  if (spec.is_bf16()) return Values{elements};
  switch (elements.scalar_type()) {
    case at::kByte: return cast_input(spec, elements, scale, amax);
    case at::kFloat8_e4m3fn: return Fp4AsFp8{elements, scale, amax};
    default: return Decoded{elements, scale, amax};
  }
}

Codes as_codes(const Spec& spec, const SwizzledCodes& in, const SymInt& cols) {
  const SymInt &down = in.scale.sym_size(0), &across = in.scale.sym_size(1);
  const Tensor scale = unswizzle_scales(
      in.scale.reshape_symint({down * kSwizzleTileRows, across * kSwizzleTileCols}),
      in.codes.sym_size(0), spec.scale_cols(cols));
  if (spec.block_rows == 1) return {in.codes, scale, in.amax};
  return {in.codes, scale.slice(0, 0, std::nullopt, spec.block_rows).contiguous(), in.amax};
}

void check_input(const char* name, const Spec& spec, const ProductInput& input,
                 const InputSizes& sizes) {
  const auto [elements, scale, amax] = tensors_of(input);
  const std::int64_t dims = sizes.matrices ? 3 : 2;
  TORCH_CHECK_VALUE(elements->dim() == dims, "scaled_mm: expected ", name, " of ", dims,
                    " dimensions, got ", elements->dim());
  TORCH_CHECK_VALUE(!sizes.matrices || elements->sym_size(0) == *sizes.matrices,
                    "scaled_mm: expected ", name, " of ", *sizes.matrices,
                    " matrices, one a group, got ", elements->sym_size(0));
  const at::ScalarType dtype = elements->scalar_type();
  TORCH_CHECK_VALUE(!spec.is_bf16() || bridge::is_value_dtype(dtype), "scaled_mm: expected ", name,
                    " in float32 or bfloat16, as it is bf16 in the product, got ", dtype);
  TORCH_CHECK_VALUE(spec.is_bf16() || is_form_of(spec, input, dtype), "scaled_mm: ", name,
                    ": expected uint8 codes or their ",
                    spec.has_fp32_values() ? at::kFloat : at::kBFloat16, " values for ", spec.str(),
                    ", got ", dtype);
  bridge::check_sizes("scaled_mm", name, *elements);
  const bool is_swizzled = std::holds_alternative<SwizzledCodes>(input);
  const bool is_packed = std::holds_alternative<Codes>(input) || is_swizzled;
  const SymInt& k = spec.is_bf16() ? sizes.values_k : sizes.k;
  const SymInt length = is_packed ? spec.code_cols(k) : spec.padded_cols(k);
  TORCH_CHECK_VALUE(elements->sym_size(-1) == length, "scaled_mm: expected ", name, " of ", length,
                    " columns for k = ", k, " under ", spec.str(), ", got ",
                    elements->sym_size(-1));
  if (spec.is_bf16()) return;
  const SymInt of_matrices = elements->sym_size(-2) * sizes.matrices.value_or(SymInt(1));
  const SymInt rows =
      sizes.is_along_contraction ? of_matrices * sizes.groups.value_or(SymInt(1)) : of_matrices;
  if (is_swizzled)
    check_swizzled(name, spec, *scale, elements->sym_size(-2), sizes);
  else if (is_packed)
    check_scale(name, spec, *scale, is_scale_dtype(scale->scalar_type(), spec),
                scale_count(spec, *elements, rows, sizes), " scales of ", scale_dtype(spec));
  else if (std::holds_alternative<Fp4AsFp8>(input) || (has_row_factors(spec) && !spec.has_blocks()))
    check_row_numbers(name, spec, *scale, rows, sizes, " row scales of ");
  if (spec.has_outer_row_amax())
    check_row_numbers(name, spec, *amax, rows, sizes, " row amaxes of ");
  check_tensor_factor("scaled_mm", name, spec, *scale, *amax,
                      sizes.matrices.value_or(sizes.groups.value_or(SymInt(1))));
}

}  // namespace minifloat::torch_ops
