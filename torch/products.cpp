// The product of two quantized operands, a · bᵀ. On the CPU every product is the exact one: decoded values
// in bf16, fp32 accumulation, the tensor scales as alpha, one rounding of the result.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "bridge.h"
#include "minifloat/quantize.h"
#include "ops.h"

namespace minifloat {
namespace {

using at::Tensor;
using c10::SymInt;

// One side of a product, ready to be multiplied: values (rows, k), and the factors still owed.
struct Side {
  Tensor values;
  float factor = 1.0f;  // of the whole operand
  Tensor row_factors;   // fp32 (rows), where a row scale is no power of two
};

bool owes_row_factors(const Spec& spec) {
  return spec.rule == ScaleRule::kRow && spec.scale_rounding == ScaleRounding::kExact;
}

void check_side(const char* name, const Spec& spec, const Tensor& codes, const Tensor& scale,
                const Tensor& amax, const SymInt& k) {
  TORCH_CHECK_VALUE(codes.dim() == 2, "scaled_mm: expected ", name, " of 2 dimensions, got ",
                    codes.dim());
  const bool packed = codes.scalar_type() == at::kByte;
  TORCH_CHECK_VALUE(!packed || !spec.is_bf16(), "scaled_mm: ", name,
                    " is bf16 in the product, got packed codes");
  TORCH_CHECK_VALUE(packed || codes.scalar_type() == at::kBFloat16 || spec.is_bf16(),
                    "scaled_mm: ", name, ": expected uint8 codes or their bfloat16 values for ",
                    spec.str(), ", got ", codes.scalar_type());
  const SymInt length = packed ? spec.code_cols(k) : spec.padded_cols(k);
  TORCH_CHECK_VALUE(codes.sym_size(1) == length, "scaled_mm: expected ", name, " of ", length,
                    " columns for k = ", k, " under ", spec.str(), ", got ", codes.sym_size(1));
  TORCH_CHECK_VALUE(spec.rule != ScaleRule::kTensor || scale.sym_numel() == 1,
                    "scaled_mm: expected one scale for ", name, ", got ", scale.sym_numel());
  TORCH_CHECK_VALUE(spec.rule != ScaleRule::kNvfp4 || amax.sym_numel() == 1,
                    "scaled_mm: expected one amax for ", name, " under ", spec.str(), ", got ",
                    amax.sym_numel());
}

Side ready(const Spec& spec, const Tensor& codes, const Tensor& scale, const Tensor& amax,
           std::int64_t k) {
  Side side;
  side.values =
      codes.scalar_type() == at::kByte ? torch_ops::decode(codes, scale, spec.str(), k) : codes;
  if (spec.has_tensor_amax()) {
    Quantized q;
    q.spec = spec;
    q.scale = scale.const_data_ptr();
    q.amax = spec.rule == ScaleRule::kNvfp4 ? amax.const_data_ptr<float>() : nullptr;
    tensor_factor(q, &side.factor);
  }
  if (owes_row_factors(spec)) side.row_factors = scale;
  return side;
}

// (m, k) · (n, k)ᵀ in `compute`, times alpha, plus bias, rounded once.
Tensor multiply(const Tensor& a, const Tensor& b, float alpha, const std::optional<Tensor>& bias,
                at::ScalarType compute) {
  const Tensor left = a.to(compute), right = b.to(compute).t();
  if (bias) return at::addmm(bias->to(compute), left, right, 1, alpha);
  if (alpha == 1.0f) return at::mm(left, right);
  const Tensor ignored = at::empty({1, 1}, left.options());
  return at::addmm(ignored.expand({left.size(0), right.size(1)}), left, right, 0, alpha);
}

Tensor exact_product(const Side& a, const Side& b, const std::optional<Tensor>& bias,
                     at::ScalarType out_dtype) {
  const float alpha = a.factor * b.factor;
  if (!a.row_factors.defined() && !b.row_factors.defined())
    return multiply(a.values, b.values, alpha, bias, out_dtype);
  Tensor out = multiply(a.values, b.values, alpha, std::nullopt, at::kFloat);
  if (a.row_factors.defined()) out.mul_(a.row_factors.unsqueeze(1));
  if (b.row_factors.defined()) out.mul_(b.row_factors.unsqueeze(0));
  if (bias) out.add_(bias->to(out_dtype));  // rounded like the other path's, added in fp32
  return out.to(out_dtype);
}

void check_result(const Tensor& b, const std::optional<Tensor>& bias, at::ScalarType out_dtype) {
  TORCH_CHECK_VALUE(out_dtype == at::kFloat || out_dtype == at::kBFloat16,
                    "scaled_mm: expected out_dtype float32 or bfloat16, got ", out_dtype);
  if (bias)
    TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == b.sym_size(0),
                      "scaled_mm: expected bias (", b.sym_size(0), "), got ", bias->sym_sizes());
}

Tensor scaled_mm_meta(const Tensor& a, const Tensor& a_scale, const Tensor& a_amax, const Tensor& b,
                      const Tensor& b_scale, const Tensor& b_amax, const std::string& text,
                      SymInt k, const std::optional<Tensor>& bias, at::ScalarType out_dtype) {
  const Product product = bridge::parse_product(text);
  check_side("a", product.a, a, a_scale, a_amax, k);
  check_side("b", product.b, b, b_scale, b_amax, k);
  check_result(b, bias, out_dtype);
  return at::empty_symint({a.sym_size(0), b.sym_size(0)}, a.options().dtype(out_dtype));
}

Tensor scaled_mm_cpu(const Tensor& a, const Tensor& a_scale, const Tensor& a_amax, const Tensor& b,
                     const Tensor& b_scale, const Tensor& b_amax, const std::string& text, SymInt k,
                     const std::optional<Tensor>& bias, at::ScalarType out_dtype) {
  const Product product = bridge::parse_product(text);
  check_side("a", product.a, a, a_scale, a_amax, k);
  check_side("b", product.b, b, b_scale, b_amax, k);
  check_result(b, bias, out_dtype);
  const std::int64_t length = k.guard_int(__FILE__, __LINE__);
  return exact_product(ready(product.a, a, a_scale, a_amax, length),
                       ready(product.b, b, b_scale, b_amax, length), bias, out_dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, CPU, m) { m.impl("scaled_mm", scaled_mm_cpu); }
TORCH_LIBRARY_IMPL(minifloat, Meta, m) { m.impl("scaled_mm", scaled_mm_meta); }
TORCH_LIBRARY_IMPL(minifloat, Autograd, m) {
  m.impl("scaled_mm", torch::CppFunction::makeFallthrough());
}

}  // namespace minifloat
