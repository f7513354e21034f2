// The engine for FP4 codes under power-of-two scales. It converts them to E4M3 codes of the same
// values under one scale for each row (core/fp4_as_fp8.h), which an FP8 product multiplies. One
// kernel for both operands, then one for the product.
#include "ops/kernels.h"
#include "ops/ops.h"
#include "products/fp8.h"

namespace minifloat::torch_ops {
namespace fp4_by_fp8 {

bool supports(const Product& product, int capability) {
  return reads_fp8(capability) && is_fp4_by_fp8(product);
}

ProductInput prepare(const Spec& spec, const Codes& codes, const c10::SymInt& cols) {
  return as_fp8(spec, codes, cols);
}

// Returns both operands in the form that the product reads.
std::pair<Fp4AsFp8, Fp4AsFp8> prepare_both(const ProductCall& call) {
  const Codes *const a = std::get_if<Codes>(&call.a), *const b = std::get_if<Codes>(&call.b);
  const auto &a_spec = call.product.a, &b_spec = call.product.b;
  if (!a || !b) return {as_fp8(a_spec, call.a, call.k), as_fp8(b_spec, call.b, call.k)};
  const auto [left, right] = direct_fp4_as_fp8({a_spec, a->codes, a->scale, a->amax},
                                               {b_spec, b->codes, b->scale, b->amax}, call.k);
  return {{left.first, left.second, a->amax}, {right.first, right.second, b->amax}};
}

Tensor multiply(const ProductCall& call) {
  const auto [a, b] = prepare_both(call);
  if (!is_safe_for_rows(a.codes.device())) {
    const ProductInput left = a, right = b;
    return kExactCuda.multiply({call.product, left, right, call.k, call.result, call.groups});
  }
  return fp8_product({Elements::kE4m3, a.codes, a.row_scale},
                     {Elements::kE4m3, b.codes, b.row_scale}, true, call.product.fast, call.result);
}

}  // namespace fp4_by_fp8

constinit const Engine kFp4ByFp8 = {
    .name = "fp4_by_fp8",
    .does = "an FP8 GEMM of the same values: E4M3 holds FP4 under power-of-two scales",
    .supports = fp4_by_fp8::supports,
    .takes = takes_rows,
    .reads_fp4_as_fp8 = true,
    .prepare = fp4_by_fp8::prepare,
    .multiply = fp4_by_fp8::multiply};

}  // namespace minifloat::torch_ops
