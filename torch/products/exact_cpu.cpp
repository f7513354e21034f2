// The exact product on the CPU: torch's matrix product, with the tensor scales as alpha.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "ops/direct.h"
#include "products/exact.h"

namespace minifloat::torch_ops {
namespace {

// Tells whether torch has a fast bf16 product on this CPU. Without one (x86-64 without AVX-512) its
// bf16 product takes 5 to 50 times as long as its fp32 product.
bool multiplies_bf16() {
  static const bool answer = [] {
    const auto asked =
        c10::Dispatcher::singleton().findSchema({"mkldnn::_is_mkldnn_bf16_supported", ""});
    return asked && asked->typed<bool()>().call();
  }();
  return answer;
}

// Returns (m, k) · (n, k)ᵀ, times alpha, plus bias, rounded once to dtype. The product is in fp32
// if an operand is, or if this CPU is slow in bf16.
Tensor matrix_product(const Tensor& a, const Tensor& b, float alpha,
                      const std::optional<Tensor>& bias, at::ScalarType dtype) {
  const at::ScalarType compute = are_bf16(a, b) && multiplies_bf16() ? dtype : at::kFloat;
  const Tensor left = to_dtype(a, compute), right = to_dtype(b, compute).t();
  Tensor out;
  if (bias) {
    out = at::addmm(to_dtype(to_dtype(*bias, dtype), compute), left, right, 1, alpha);
  } else if (alpha == 1.0f) {
    out = at::mm(left, right);
  } else {
    out = direct_empty(left, {left.size(0), right.size(1)}, compute);
    at::addmm_out(out, out, left, right, 0, alpha);  // beta = 0: out is not read
  }
  return to_dtype(out, dtype);
}

float factor_of(const ExactSide& side) {
  return side.factor ? *tensor_factor_of(*side.factor).const_data_ptr<float>() : 1.0f;
}

}  // namespace

Tensor exact_product_on_cpu(const ExactSide& a, const ExactSide& b, const Result& result) {
  const float alpha = factor_of(a) * factor_of(b);
  if (!a.row_factors.defined() && !b.row_factors.defined())
    return matrix_product(a.values, b.values, alpha, result.bias, result.dtype);
  Tensor out = matrix_product(a.values, b.values, alpha, std::nullopt, at::kFloat);
  if (a.row_factors.defined()) out.mul_(a.row_factors.unsqueeze(1));
  if (b.row_factors.defined()) out.mul_(b.row_factors.unsqueeze(0));
  if (result.bias)
    out.add_(result.bias->to(result.dtype));  // rounded as in matrix_product, added in fp32
  return out.to(result.dtype);
}

namespace exact_cpu {

bool supports(const Product&, int) { return true; }

Tensor multiply(const ProductCall& call) {
  return exact_product_on_cpu(exact_side(call.product.a, call.a, call.k),
                              exact_side(call.product.b, call.b, call.k), call.result);
}

}  // namespace exact_cpu

constinit const Engine kExactCpu = {.name = "exact",
                                    .does = "a bf16 GEMM of the decoded values",
                                    .supports = exact_cpu::supports,
                                    .takes = takes_all,
                                    .reads_values = true,
                                    .prepare = prepare_exact,
                                    .multiply = exact_cpu::multiply};

}  // namespace minifloat::torch_ops
