#include "products/inputs.h"

#include <ATen/ATen.h>

#include "ops/bridge.h"
#include "ops/outputs.h"
#include "products/tensor_factor.h"

namespace minifloat::torch_ops {
namespace {

using c10::SymInt;

// Requires `count` scales of the expected dtype and shape: is_right. what: the scales, for errors.
void check_scale(const char* name, const Spec& spec, const Tensor& scale, bool is_right,
                 const SymInt& count, const char* what, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(scale.defined() && is_right && scale.sym_numel() == count,
                    "scaled_mm: expected ", count, what, dtype, " for ", name, " under ",
                    spec.str(), ", got ", scale.sym_numel(), " of ", scale.scalar_type());
}

void check_row_scale(const char* name, const Spec& spec, const Tensor& scale, const SymInt& rows) {
  const bool is_right = scale.scalar_type() == at::kFloat && scale.dim() == 1;
  check_scale(name, spec, scale, is_right, rows, " row scales of ", at::kFloat);
}

bool is_form_of(const Spec& spec, const ProductInput& input, at::ScalarType dtype) {
  if (std::holds_alternative<Codes>(input)) return dtype == at::kByte;
  if (std::holds_alternative<Decoded>(input)) return dtype == at::kBFloat16;
  return dtype == at::kFloat8_e4m3fn && spec.is_fp4_by_powers_of_two();
}

}  // namespace

InputTensors tensors_of(const ProductInput& input) {
  struct Visitor {
    InputTensors operator()(const Values& v) { return {&v.values, nullptr, nullptr}; }
    InputTensors operator()(const Codes& c) { return {&c.codes, &c.scale, &c.amax}; }
    InputTensors operator()(const Decoded& d) { return {&d.values, &d.scale, &d.amax}; }
    InputTensors operator()(const Fp4AsFp8& f) { return {&f.codes, &f.row_scale, &f.amax}; }
  };
  return std::visit(Visitor(), input);
}

ProductInput input_of(const Spec& spec, const Tensor& elements, const Tensor& scale,
                      const Tensor& amax) {
  if (spec.is_bf16()) return Values{elements};
  switch (elements.scalar_type()) {
    case at::kByte: return Codes{elements, scale, amax};
    case at::kFloat8_e4m3fn: return Fp4AsFp8{elements, scale, amax};
    default: return Decoded{elements, scale, amax};
  }
}

void check_input(const char* name, const Spec& spec, const ProductInput& input, const SymInt& k) {
  const auto [elements, scale, amax] = tensors_of(input);
  TORCH_CHECK_VALUE(elements->dim() == 2, "scaled_mm: expected ", name, " of 2 dimensions, got ",
                    elements->dim());
  const at::ScalarType dtype = elements->scalar_type();
  TORCH_CHECK_VALUE(!spec.is_bf16() || bridge::is_value_dtype(dtype), "scaled_mm: expected ", name,
                    " in float32 or bfloat16, as it is bf16 in the product, got ", dtype);
  TORCH_CHECK_VALUE(spec.is_bf16() || is_form_of(spec, input, dtype), "scaled_mm: ", name,
                    ": expected uint8 codes or their bfloat16 values for ", spec.str(), ", got ",
                    dtype);
  bridge::check_sizes("scaled_mm", name, *elements);
  const bool is_packed = std::holds_alternative<Codes>(input);
  const SymInt length = is_packed ? spec.code_cols(k) : spec.padded_cols(k);
  TORCH_CHECK_VALUE(elements->sym_size(1) == length, "scaled_mm: expected ", name, " of ", length,
                    " columns for k = ", k, " under ", spec.str(), ", got ", elements->sym_size(1));
  if (spec.is_bf16()) return;
  const SymInt rows = elements->sym_size(0);
  if (is_packed)
    check_scale(name, spec, *scale, is_scale_dtype(scale->scalar_type(), spec),
                scales_of(spec, rows, k), " scales of ", scale_dtype(spec));
  else if (std::holds_alternative<Fp4AsFp8>(input) || has_row_factors(spec))
    check_row_scale(name, spec, *scale, rows);
  check_tensor_factor("scaled_mm", name, spec, *scale, *amax);
}

}  // namespace minifloat::torch_ops
