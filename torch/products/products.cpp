// The product of two quantized operands, a · bᵀ: the checks, the choice of an engine (engines.h), and the CPU's,
// which is the exact product: decoded values in bf16, fp32 accumulation, the tensor scales as alpha, one rounding of
// the result.
#include "products/products.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "minifloat/quantize.h"
#include "ops/bridge.h"
#include "ops/kernels.h"
#include "ops/ops.h"
#include "ops/outputs.h"
#include "ops/plain.h"

namespace minifloat {
namespace torch_ops {
namespace {

// (m, k) · (n, k)ᵀ, times alpha, plus bias, rounded once to dtype. An fp32 operand is multiplied as it is, in fp32.
Tensor multiply(const Tensor& a, const Tensor& b, float alpha, const std::optional<Tensor>& bias,
                at::ScalarType dtype) {
  const at::ScalarType compute = are_narrow(a, b) ? dtype : at::kFloat;
  const Tensor left = to_dtype(a, compute), right = plain_transpose(to_dtype(b, compute));
  Tensor out;
  if (bias) {
    out = at::addmm(to_dtype(to_dtype(*bias, dtype), compute), left, right, 1, alpha);
  } else if (alpha == 1.0f) {
    out = at::mm(left, right);
  } else {
    out = plain_empty(left, {left.size(0), right.size(1)}, compute);
    at::addmm_out(out, out, left, right, 0, alpha);  // times 0: what was there is not read
  }
  return to_dtype(out, dtype);
}

float factor_of(const ExactSide& side) {
  return side.factor.defined() ? *side.factor.const_data_ptr<float>() : 1.0f;
}

}  // namespace

Tensor exact_product_cpu(const ExactSide& a, const ExactSide& b, const Result& result) {
  const float alpha = factor_of(a) * factor_of(b);
  if (!a.row_factors.defined() && !b.row_factors.defined())
    return multiply(a.values, b.values, alpha, result.bias, result.dtype);
  Tensor out = multiply(a.values, b.values, alpha, std::nullopt, at::kFloat);
  if (a.row_factors.defined()) out.mul_(a.row_factors.unsqueeze(1));
  if (b.row_factors.defined()) out.mul_(b.row_factors.unsqueeze(0));
  if (result.bias)
    out.add_(result.bias->to(result.dtype));  // rounded like the other path's, added in fp32
  return out.to(result.dtype);
}

void check_tensor_factor(const char* op, const char* name, const Spec& spec, const Tensor& scale,
                         const Tensor& amax) {
  if (!spec.has_tensor_amax()) return;
  const bool is_scale = spec.rule == ScaleRule::kTensor;
  const Tensor& factor = is_scale ? scale : amax;
  TORCH_CHECK_VALUE(
      factor.defined() && factor.scalar_type() == at::kFloat && factor.sym_numel() == 1, op,
      ": expected one float32 ", is_scale ? "scale" : "amax", " for ", name, " under ", spec.str(),
      ", got ", factor.sym_numel(), " of ", factor.scalar_type());
}

Tensor tensor_factor_of(const Spec& spec, const Tensor& scale, const Tensor& amax) {
  if (spec.rule == ScaleRule::kTensor) return plain_view(scale, at::kFloat, {});
  const Tensor out = plain_empty(amax, {}, at::kFloat);
  bridge::with_value_errors([&] {
    const Quantized q = {
        .spec = spec, .amax = amax.const_data_ptr<float>(), .device = bridge::backend_of(amax)};
    tensor_factor(q, out.mutable_data_ptr<float>(), bridge::ExecutionOn(amax));
  });
  return out;
}

}  // namespace torch_ops

namespace {

using at::Tensor;
using c10::SymInt;
using torch_ops::Engine;
using torch_ops::ExactSide;
using torch_ops::is_scale_dtype;
using torch_ops::scales_of;

bool owes_row_factors(const Spec& spec) {
  return spec.rule == ScaleRule::kRow && spec.scale_rounding == ScaleRounding::kExact;
}

// FP4 codes as the op `carry` gives them; their scale is then one a row.
bool is_carried(const Tensor& codes) { return codes.scalar_type() == at::kFloat8_e4m3fn; }

// The scale that a side's form is multiplied by: with packed codes all of its spec, with carried codes or an exact row
// rule one a row. The values of other rules have theirs in them.
void check_scale(const char* name, const Spec& spec, const Tensor& codes, const Tensor& scale,
                 const SymInt& k) {
  const bool packed = codes.scalar_type() == at::kByte, by_row = is_carried(codes);
  if (!packed && !by_row && !owes_row_factors(spec)) return;
  const SymInt rows = codes.sym_size(0), count = packed ? scales_of(spec, rows, k) : rows;
  const bool is_of_spec = packed ? is_scale_dtype(scale.scalar_type(), spec)
                                 : scale.scalar_type() == at::kFloat && scale.dim() == 1;
  TORCH_CHECK_VALUE(scale.defined() && is_of_spec && scale.sym_numel() == count,
                    "scaled_mm: expected ", count, packed ? " scales of " : " row scales of ",
                    packed ? torch_ops::scale_dtype(spec) : at::kFloat, " for ", name, " under ",
                    spec.str(), ", got ", scale.sym_numel(), " of ", scale.scalar_type());
}

void check_side(const char* name, const Spec& spec, const Tensor& codes, const Tensor& scale,
                const Tensor& amax, const SymInt& k) {
  TORCH_CHECK_VALUE(codes.dim() == 2, "scaled_mm: expected ", name, " of 2 dimensions, got ",
                    codes.dim());
  const at::ScalarType dtype = codes.scalar_type();
  const bool packed = dtype == at::kByte;
  TORCH_CHECK_VALUE(!spec.is_bf16() || bridge::is_value_dtype(dtype), "scaled_mm: expected ", name,
                    " in float32 or bfloat16, as it is bf16 in the product, got ", dtype);
  TORCH_CHECK_VALUE(spec.is_bf16() || packed || dtype == at::kBFloat16 ||
                        (is_carried(codes) && spec.is_fp4_by_powers_of_two()),
                    "scaled_mm: ", name, ": expected uint8 codes or their bfloat16 values for ",
                    spec.str(), ", got ", dtype);
  bridge::check_sizes("scaled_mm", name, codes);
  const SymInt length = packed ? spec.code_cols(k) : spec.padded_cols(k);
  TORCH_CHECK_VALUE(codes.sym_size(1) == length, "scaled_mm: expected ", name, " of ", length,
                    " columns for k = ", k, " under ", spec.str(), ", got ", codes.sym_size(1));
  check_scale(name, spec, codes, scale, k);
  torch_ops::check_tensor_factor("scaled_mm", name, spec, scale, amax);
}

ExactSide exact_side(const Spec& spec, const Tensor& codes, const Tensor& scale, const Tensor& amax,
                     std::int64_t k) {
  ExactSide side;
  if (is_carried(codes)) {
    side.values = codes.to(at::kBFloat16);
    side.row_factors = scale;
    return side;
  }
  side.values =
      codes.scalar_type() == at::kByte ? torch_ops::decode(codes, scale, spec.str(), k) : codes;
  if (spec.has_tensor_amax()) side.factor = torch_ops::tensor_factor_of(spec, scale, amax);
  if (owes_row_factors(spec)) side.row_factors = scale;
  return side;
}

// Whether an engine can read the codes where they lie.
bool are_readable(const Tensor& codes) {
  return (codes.scalar_type() == at::kByte || is_carried(codes)) && codes.is_contiguous() &&
         reinterpret_cast<std::uintptr_t>(codes.const_data_ptr()) % 16 == 0;
}

// One side as the caller gave it.
struct Side {
  const Spec& spec;
  const Tensor &codes, &scale, &amax;
};

torch_ops::BlockScaledSide block_scaled(const Side& side) {
  Tensor factor;
  if (side.spec.has_tensor_amax())
    factor = torch_ops::tensor_factor_of(side.spec, side.scale, side.amax);
  return torch_ops::block_scaled_side(side.spec, side.codes, side.scale, factor);
}

// FP4 under powers of two, as an FP8 product of the same values.
Tensor fp4_by_fp8_product(const Side& a, const Side& b, std::int64_t k, bool fast,
                          const torch_ops::Result& result) {
  static const Spec rows = Spec::parse("e4m3/row");
  const auto carried = [&](const Side& side) {
    return is_carried(side.codes)
               ? std::pair(side.codes, side.scale)
               : torch_ops::carry(side.codes, side.scale, side.amax, side.spec.str(), k);
  };
  const auto [a_codes, a_scale] = carried(a);
  const auto [b_codes, b_scale] = carried(b);
  return torch_ops::fp8_product(Engine::kFp8Row, {rows, a_codes, a_scale}, {rows, b_codes, b_scale},
                                fast, result);
}

// The arguments of scaled_mm. An undefined tensor stands for one that a spec has not.
struct Arguments {
  const Product& product;
  Side a, b;
  const SymInt& k;
  const std::optional<Tensor>& bias;
  at::ScalarType out_dtype;

  template <class F>
  void each_tensor(F f) const {
    f("a", a.codes), f("the scale of a", a.scale), f("the amax of a", a.amax);
    f("b", b.codes), f("the scale of b", b.scale), f("the amax of b", b.amax);
    if (bias) f("bias", *bias);
  }
};

void check_arguments(const Arguments& args) {
  constexpr const char* kOp = "scaled_mm";
  const auto& [product, a, b, k, bias, out_dtype] = args;
  bridge::check_size(kOp, "k", k);
  check_side("a", a.spec, a.codes, a.scale, a.amax, k);
  check_side("b", b.spec, b.codes, b.scale, b.amax, k);
  TORCH_CHECK_VALUE(bridge::is_value_dtype(out_dtype),
                    "scaled_mm: expected out_dtype float32 or bfloat16, got ", out_dtype);
  if (bias) {
    bridge::check_value_dtype(kOp, "bias", *bias);
    TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == b.codes.sym_size(0),
                      "scaled_mm: expected bias (", b.codes.sym_size(0), "), got ",
                      bias->sym_sizes());
  }
  args.each_tensor(
      [&](const char* name, const Tensor& t) { bridge::check_same_device(kOp, name, t, a.codes); });
}

Tensor scaled_mm_meta(const Tensor& a, const Tensor& a_scale, const Tensor& a_amax, const Tensor& b,
                      const Tensor& b_scale, const Tensor& b_amax, const std::string& text,
                      SymInt k, const std::optional<Tensor>& bias, at::ScalarType out_dtype) {
  const Product& product = bridge::parse_product(text);
  check_arguments({product,
                   {product.a, a, a_scale, a_amax},
                   {product.b, b, b_scale, b_amax},
                   k,
                   bias,
                   out_dtype});
  return at::empty_symint({a.sym_size(0), b.sym_size(0)}, a.options().dtype(out_dtype));
}

Tensor scaled_mm_kernel(const Tensor& a, const Tensor& a_scale, const Tensor& a_amax,
                        const Tensor& b, const Tensor& b_scale, const Tensor& b_amax,
                        const std::string& text, SymInt k, const std::optional<Tensor>& bias,
                        at::ScalarType out_dtype) {
  const Product& product = bridge::parse_product(text);
  const Arguments args = {
      product,  {product.a, a, a_scale, a_amax}, {product.b, b, b_scale, b_amax}, k, bias,
      out_dtype};
  check_arguments(args);
  args.each_tensor(
      [](const char* name, const Tensor& t) { bridge::check_memory("scaled_mm", name, t); });

  const at::AutoDispatchBelowADInplaceOrView below;  // layers differentiate, in linear.cpp
  const torch_ops::Result result = {bias, out_dtype};
  const std::int64_t length = k.guard_int(__FILE__, __LINE__);
  if (are_readable(a) && are_readable(b)) {
    const Engine engine = torch_ops::engine_of(product, torch_ops::compute_capability(a.device()),
                                               {.m = a.size(0),
                                                .n = b.size(0),
                                                .k = product.a.padded_cols(length),
                                                .out_dtype = out_dtype,
                                                .has_bias = bias.has_value(),
                                                .is_carried = is_carried(a) || is_carried(b)});
    if (engine == Engine::kBlockScaled)
      return torch_ops::block_scaled_product(block_scaled(args.a), block_scaled(args.b), result);
    if (engine == Engine::kFp4ByFp8)
      return fp4_by_fp8_product(args.a, args.b, length, product.fast, result);
    if (engine != Engine::kExact)
      return torch_ops::fp8_product(engine, {product.a, a, a_scale}, {product.b, b, b_scale},
                                    product.fast, result);
  }
  const ExactSide left = exact_side(product.a, a, a_scale, a_amax, length),
                  right = exact_side(product.b, b, b_scale, b_amax, length);
  return a.is_cuda() ? torch_ops::exact_product_cuda(left, right, result)
                     : torch_ops::exact_product_cpu(left, right, result);
}

}  // namespace

Tensor torch_ops::plain_scaled_mm(const QuantizedOperand& a, const QuantizedOperand& b,
                                  const std::string& product, std::int64_t k,
                                  const std::optional<Tensor>& bias, at::ScalarType out_dtype) {
  return scaled_mm_kernel(a.codes, a.scale, a.amax, b.codes, b.scale, b.amax, product, k, bias,
                          out_dtype);
}

TORCH_LIBRARY_IMPL(minifloat, CPU, m) { m.impl("scaled_mm", scaled_mm_kernel); }
TORCH_LIBRARY_IMPL(minifloat, CUDA, m) { m.impl("scaled_mm", scaled_mm_kernel); }
TORCH_LIBRARY_IMPL(minifloat, Meta, m) { m.impl("scaled_mm", scaled_mm_meta); }
// Layers differentiate, in linear.cpp. A product by itself does not: a backward pass or a tangent through it is an error.
TORCH_LIBRARY_IMPL(minifloat, Autograd, m) {
  m.impl("scaled_mm", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace minifloat
