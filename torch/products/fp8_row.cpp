// The engine for FP8 codes under one scale for each row: cuBLASLt's scaled product, or ATen's. One
// kernel.
#include "products/fp8.h"

namespace minifloat::torch_ops {
namespace fp8_row {

bool supports(const Product& product, int capability) {
  const auto &a = product.a, &b = product.b;
  return reads_fp8(capability) && a.rule == ScaleRule::kRow && b.rule == ScaleRule::kRow &&
         has_fp8_product(a, b);
}

Tensor multiply(const ProductCall& call) {
  const Product& product = call.product;
  if (!is_safe_for_rows(std::get<Codes>(call.a).codes.device())) return kExactCuda.multiply(call);
  return fp8_product(fp8_side(product.a, call.a), fp8_side(product.b, call.b), true, product.fast,
                     call.result);
}

}  // namespace fp8_row

constinit const Engine kFp8Row = {.name = "fp8_row",
                                  .does = "an FP8 GEMM with a scale a row",
                                  .supports = fp8_row::supports,
                                  .takes = takes_rows,
                                  .multiply = fp8_row::multiply};

}  // namespace minifloat::torch_ops
