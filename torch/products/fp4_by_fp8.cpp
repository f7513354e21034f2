// The engine for FP4 codes under power-of-two scales, times such codes or FP8 codes under one scale
// for each row. It converts FP4 to E4M3 codes of the same values under one scale for each row
// (core/fp4_as_fp8.h), which an FP8 product multiplies. One kernel for all FP4 operands, then one
// for the product.
#include "ops/kernels.h"
#include "ops/ops.h"
#include "products/fp8.h"

namespace minifloat::torch_ops {
namespace fp4_by_fp8 {

bool supports(const Product& product, int capability) {
  return reads_fp8(capability) && is_fp4_by_fp8(product);
}

// Returns an operand in the form that the product reads.
ProductInput as_rows(const Spec& spec, const ProductInput& input, const c10::SymInt& cols) {
  if (spec.is_fp8()) return input;
  return as_fp8(spec, input, cols);
}

ProductInput prepare(const Spec& spec, const Codes& codes, const c10::SymInt& cols) {
  return as_rows(spec, codes, cols);
}

std::pair<ProductInput, ProductInput> prepare_both(const ProductCall& call) {
  const auto &a_spec = call.product.a, &b_spec = call.product.b;
  const Codes *const a = std::get_if<Codes>(&call.a), *const b = std::get_if<Codes>(&call.b);
  if (!a || !b || a_spec.is_fp8() || b_spec.is_fp8())
    return {as_rows(a_spec, call.a, call.k), as_rows(b_spec, call.b, call.k)};
  const auto [left, right] = direct_fp4_as_fp8({a_spec, a->codes, a->scale, a->amax},
                                               {b_spec, b->codes, b->scale, b->amax}, call.k);
  return {Fp4AsFp8{left.first, left.second, a->amax}, Fp4AsFp8{right.first, right.second, b->amax}};
}

Tensor multiply(const ProductCall& call) {
  const Product& product = call.product;
  const auto [a, b] = prepare_both(call);
  const InputTensors left = tensors_of(a), right = tensors_of(b);
  if (!is_safe_for_rows(left.elements->device()))
    return kExactCuda.multiply({product, a, b, call.k, call.result, call.groups});
  return fp8_product({fp8_elements(product.a), *left.elements, *left.scale},
                     {fp8_elements(product.b), *right.elements, *right.scale}, true, product.fast,
                     call.result);
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
