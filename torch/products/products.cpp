// The product of two quantized operands, a · bᵀ: the checks, the choice of an engine (engines.h), and the CPU's,
// which is the exact product: decoded values in bf16, fp32 accumulation, the tensor scales as alpha, one rounding of
// the result.
#include "products/products.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
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

namespace torch_ops {
namespace {

using c10::SymInt;

template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};

Decoded decoded_of(const Spec& spec, const Codes& in, const SymInt& k) {
  return {decode(in.codes, in.scale, spec, k), in.scale, in.amax};
}

Fp4AsFp8 fp8_codes_of(const Spec& spec, const Codes& in, const SymInt& k) {
  auto [codes, row_scale] = fp4_as_fp8(in.codes, in.scale, in.amax, spec, k);
  return {std::move(codes), std::move(row_scale), in.amax};
}

ExactSide exact_side(const Spec& spec, const Decoded& in) {
  ExactSide side = {.values = in.values, .factor = {}, .row_factors = {}};
  if (spec.has_tensor_amax()) side.factor = tensor_factor_of(spec, in.scale, in.amax);
  if (has_row_factors(spec)) side.row_factors = in.scale;
  return side;
}

ExactSide exact_side(const Spec& spec, const ProductInput& input, std::int64_t k) {
  return std::visit(
      Overloaded{[](const Values& in) { return ExactSide{in.values, {}, {}}; },
                 [&](const Codes& in) { return exact_side(spec, decoded_of(spec, in, k)); },
                 [&](const Decoded& in) { return exact_side(spec, in); },
                 [](const Fp4AsFp8& in) {
                   return ExactSide{in.codes.to(at::kBFloat16), {}, in.row_scale};
                 }},
      input);
}

// The codes that an engine can read where they lie; null: there are none, or an engine cannot.
const Tensor* readable_codes(const ProductInput& input) {
  const Codes* const codes = std::get_if<Codes>(&input);
  const Fp4AsFp8* const fp8 = std::get_if<Fp4AsFp8>(&input);
  if (!codes && !fp8) return nullptr;
  const Tensor& t = codes ? codes->codes : fp8->codes;
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(t.const_data_ptr()) % 16 == 0;
  return t.is_contiguous() && is_aligned ? &t : nullptr;
}

BlockScaledSide block_scaled(const Spec& spec, const Codes& in) {
  Tensor factor;
  if (spec.has_tensor_amax()) factor = tensor_factor_of(spec, in.scale, in.amax);
  return block_scaled_side(spec, in.codes, in.scale, factor);
}

// FP4 under powers of two, as an FP8 product of the same values.
Tensor fp4_by_fp8_product(const Product& product, const ProductInput& a, const ProductInput& b,
                          std::int64_t k, const Result& result) {
  static const Spec rows = Spec::parse("e4m3/row");
  const auto as_fp8 = [&](const Spec& spec, const ProductInput& input) {
    const Codes* const codes = std::get_if<Codes>(&input);
    return codes ? fp8_codes_of(spec, *codes, k) : std::get<Fp4AsFp8>(input);
  };
  const Fp4AsFp8 left = as_fp8(product.a, a), right = as_fp8(product.b, b);
  return fp8_product(Engine::kFp8Row, {rows, left.codes, left.row_scale},
                     {rows, right.codes, right.row_scale}, product.fast, result);
}

Tensor multiply(const PlannedProduct& planned, const ProductInput& a, const ProductInput& b,
                std::int64_t k, const Result& result) {
  const Product& product = planned.product;
  const Tensor *const left = readable_codes(a), *const right = readable_codes(b);
  if (left && right) {
    const Engine engine = engine_of(product, planned.capability,
                                    {.m = left->size(0),
                                     .n = right->size(0),
                                     .k = product.a.padded_cols(k),
                                     .out_dtype = result.dtype,
                                     .has_bias = result.bias.has_value(),
                                     .has_fp4_as_fp8 = std::holds_alternative<Fp4AsFp8>(a) ||
                                                       std::holds_alternative<Fp4AsFp8>(b)});
    if (engine == Engine::kBlockScaled)
      return block_scaled_product(block_scaled(product.a, std::get<Codes>(a)),
                                  block_scaled(product.b, std::get<Codes>(b)), result);
    if (engine == Engine::kFp4ByFp8) return fp4_by_fp8_product(product, a, b, k, result);
    if (engine != Engine::kExact)
      return fp8_product(engine, {product.a, *left, std::get<Codes>(a).scale},
                         {product.b, *right, std::get<Codes>(b).scale}, product.fast, result);
  }
  const ExactSide exact_a = exact_side(product.a, a, k), exact_b = exact_side(product.b, b, k);
  return exact_a.values.is_cuda() ? exact_product_cuda(exact_a, exact_b, result)
                                  : exact_product_cpu(exact_a, exact_b, result);
}

void check_product(const Product& product, const ProductInput& a, const ProductInput& b,
                   const SymInt& k, const Result& result) {
  constexpr const char* kOp = "scaled_mm";
  bridge::check_size(kOp, "k", k);
  check_input("a", product.a, a, k);
  check_input("b", product.b, b, k);
  TORCH_CHECK_VALUE(bridge::is_value_dtype(result.dtype),
                    "scaled_mm: expected out_dtype float32 or bfloat16, got ", result.dtype);
  if (!result.bias) return;
  bridge::check_value_dtype(kOp, "bias", *result.bias);
  const SymInt n = tensors_of(b).elements->sym_size(0);
  TORCH_CHECK_VALUE(result.bias->dim() == 1 && result.bias->sym_size(0) == n,
                    "scaled_mm: expected bias (", n, "), got ", result.bias->sym_sizes());
}

// Calls f with the name, for errors, and each tensor of a product.
template <class F>
void each_tensor(const InputTensors& a, const InputTensors& b, const std::optional<Tensor>& bias,
                 F f) {
  const auto call = [&](const char* name, const Tensor* t) {
    if (t) f(name, *t);
  };
  call("a", a.elements), call("the scale of a", a.scale), call("the amax of a", a.amax);
  call("b", b.elements), call("the scale of b", b.scale), call("the amax of b", b.amax);
  if (bias) f("bias", *bias);
}

void check_devices(const InputTensors& a, const InputTensors& b,
                   const std::optional<Tensor>& bias) {
  each_tensor(a, b, bias, [&](const char* name, const Tensor& t) {
    bridge::check_same_device("scaled_mm", name, t, *a.elements);
  });
}

void check_memory(const InputTensors& a, const InputTensors& b, const std::optional<Tensor>& bias) {
  each_tensor(a, b, bias, [](const char* name, const Tensor& t) {
    bridge::check_memory("scaled_mm", name, t);
  });
}

Tensor scaled_mm_meta(const Tensor& a, const Tensor& a_scale, const Tensor& a_amax, const Tensor& b,
                      const Tensor& b_scale, const Tensor& b_amax, const std::string& text,
                      SymInt k, const std::optional<Tensor>& bias, at::ScalarType out_dtype) {
  const Product& product = bridge::parse_product(text);
  check_product(product, input_of(product.a, a, a_scale, a_amax),
                input_of(product.b, b, b_scale, b_amax), k, {bias, out_dtype});
  check_devices({&a, &a_scale, &a_amax}, {&b, &b_scale, &b_amax}, bias);
  return at::empty_symint({a.sym_size(0), b.sym_size(0)}, a.options().dtype(out_dtype));
}

Tensor scaled_mm_kernel(const Tensor& a, const Tensor& a_scale, const Tensor& a_amax,
                        const Tensor& b, const Tensor& b_scale, const Tensor& b_amax,
                        const std::string& text, SymInt k, const std::optional<Tensor>& bias,
                        at::ScalarType out_dtype) {
  const PlannedProduct planned = plan_product(bridge::parse_product(text), text, a.device());
  const Product& product = planned.product;
  const ProductInput left = input_of(product.a, a, a_scale, a_amax),
                     right = input_of(product.b, b, b_scale, b_amax);
  const InputTensors of_a = {&a, &a_scale, &a_amax}, of_b = {&b, &b_scale, &b_amax};
  check_product(product, left, right, k, {bias, out_dtype});
  check_devices(of_a, of_b, bias);
  check_memory(of_a, of_b, bias);
  const at::AutoDispatchBelowADInplaceOrView below;  // layers differentiate, in linear.cpp
  return multiply(planned, left, right, k.guard_int(__FILE__, __LINE__), {bias, out_dtype});
}

// An op takes defined tensors; an empty one stands for none.
Tensor or_empty(const Tensor* t, const Tensor& like) {
  return t && t->defined() ? *t : at::empty({0}, like.options().dtype(at::kFloat));
}

}  // namespace

Tensor scaled_mm(const PlannedProduct& planned, const ProductInput& a, const ProductInput& b,
                 const SymInt& k, const std::optional<Tensor>& bias, at::ScalarType out_dtype) {
  const InputTensors left = tensors_of(a), right = tensors_of(b);
  const auto length = k.maybe_as_int();
  if (length && is_plain({left.elements, left.scale, left.amax, right.elements, right.scale,
                          right.amax, bias ? &*bias : nullptr})) {
    check_product(planned.product, a, b, k, {bias, out_dtype});
    check_devices(left, right, bias);
    check_memory(left, right, bias);
    const at::AutoDispatchBelowADInplaceOrView below;
    return multiply(planned, a, b, *length, {bias, out_dtype});
  }
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("minifloat::scaled_mm", "")
          .typed<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                        const Tensor&, const std::string&, SymInt, const std::optional<Tensor>&,
                        at::ScalarType)>();
  const Tensor &a_elements = *left.elements, &b_elements = *right.elements;
  return op.call(a_elements, or_empty(left.scale, a_elements), or_empty(left.amax, a_elements),
                 b_elements, or_empty(right.scale, b_elements), or_empty(right.amax, b_elements),
                 planned.text, k, bias, out_dtype);
}

ProductInput prepare_input(const PlannedProduct& planned, const Spec& spec, ProductInput input,
                           const SymInt& cols) {
  const Codes* const codes = std::get_if<Codes>(&input);
  if (codes && planned.engine == Engine::kExact) return decoded_of(spec, *codes, cols);
  if (codes && planned.engine == Engine::kFp4ByFp8) return fp8_codes_of(spec, *codes, cols);
  return input;
}

TORCH_LIBRARY_IMPL(minifloat, CPU, m) { m.impl("scaled_mm", scaled_mm_kernel); }
TORCH_LIBRARY_IMPL(minifloat, CUDA, m) { m.impl("scaled_mm", scaled_mm_kernel); }
TORCH_LIBRARY_IMPL(minifloat, Meta, m) { m.impl("scaled_mm", scaled_mm_meta); }
// Layers differentiate, in linear.cpp. A product by itself does not: a backward pass or a tangent through it is an error.
TORCH_LIBRARY_IMPL(minifloat, Autograd, m) {
  m.impl("scaled_mm", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace torch_ops
}  // namespace minifloat
