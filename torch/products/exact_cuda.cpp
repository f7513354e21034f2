// The exact product on CUDA. Factors stay on the device: the host does not wait for them.
//
//     no factor                  ATen's bf16 product, or cuBLASLt's where it adds: one kernel
//     factors of whole operands  cuBLASLt's product with a device factor, where this build has it
//     else                       fp32 sums, then one pass: times the last factor, plus bias, round
#include <ATen/ATen.h>

#include "ops/direct.h"
#include "products/cublaslt.h"
#include "products/epilogue.h"
#include "products/exact.h"

namespace minifloat::torch_ops {
namespace exact_cuda {

bool supports(const Product&, int capability) { return capability != kNoGpu; }

Tensor empty_result(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  return direct_empty(a, {a.size(0), b.size(0)}, dtype);
}

// Returns (m, k) · (n, k)ᵀ, summed in fp32, in dtype: fp32, or bf16 by one rounding.
Tensor sums_of(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  if (are_bf16(a, b) && dtype == at::kFloat) return at::mm(a, direct_transpose(b), at::kFloat);
  return at::mm(to_dtype(a, dtype), direct_transpose(to_dtype(b, dtype)));
}

// Returns the pending factors of the sums (m, n), broadcastable.
std::vector<Tensor> factors_of(const ExactSide& a, const ExactSide& b) {
  std::vector<Tensor> factors;
  if (a.factor || b.factor) factors.push_back(factor_of_both(a, b));
  if (a.row_factors.defined()) factors.push_back(a.row_factors.unsqueeze(1));
  if (b.row_factors.defined()) factors.push_back(b.row_factors.unsqueeze(0));
  return factors;
}

Tensor product_of_sums(const ExactSide& a, const ExactSide& b, const Result& result) {
  std::vector<Tensor> factors = factors_of(a, b);
  const Tensor last = factors.back();
  factors.pop_back();
  Tensor sums = sums_of(a.values, b.values, at::kFloat);
  for (const Tensor& factor : factors) sums.mul_(factor);
  Tensor out = result.dtype == at::kFloat ? sums : empty_result(a.values, b.values, result.dtype);
  return result.bias ? at::addcmul_out(out, *result.bias, sums, last)
                     : at::mul_out(out, sums, last);
}

Tensor exact_product(const ExactSide& a, const ExactSide& b, const Result& requested) {
  const auto bias =
      requested.bias ? std::optional(to_dtype(*requested.bias, requested.dtype)) : std::nullopt;
  const bool narrow = are_bf16(a.values, b.values), rounds = requested.dtype == at::kBFloat16;
  if (rounds && !narrow)  // an operand is fp32: the product is in fp32
    return to_dtype(exact_product(a, b, {bias, at::kFloat}), requested.dtype);
  const Result result = {bias, requested.dtype, requested.sum};

  if (a.values.numel() == 0 || b.values.numel() == 0) {
    const Tensor zeros = empty_result(a.values, b.values, result.dtype).zero_();
    return bias ? zeros + *bias : zeros;
  }
  const bool has_rows = a.row_factors.defined() || b.row_factors.defined();
  if (!has_rows && !a.factor && !b.factor) {
    if (result.sum && narrow)
      if (auto sum = product_of_values(a.values, b.values, result)) return *sum;
    if (!bias) return sums_of(a.values, b.values, result.dtype);
    if (rounds) return at::addmm(*bias, a.values, direct_transpose(b.values));
    return add_bias(sums_of(a.values, b.values, at::kFloat), result);
  }
  if (!has_rows && narrow)
    if (auto product = product_by_device_factor(a, b, result)) return *product;
  return product_of_sums(a, b, result);
}

Tensor multiply(const ProductCall& call) {
  const ExactSide a = exact_side(call.product.a, call.a, call.k),
                  b = exact_side(call.product.b, call.b, call.k);
  return exact_product(a, b, call.result);
}

}  // namespace exact_cuda

constinit const Engine kExactCuda = {.name = "exact",
                                     .does = "a bf16 GEMM of the decoded values",
                                     .supports = exact_cuda::supports,
                                     .takes = takes_all,
                                     .reads_values = true,
                                     .prepare = prepare_exact,
                                     .multiply = exact_cuda::multiply};

}  // namespace minifloat::torch_ops
