// The engine for FP8 codes under one scale for each tensor: cuBLASLt's scaled product, or ATen's.
// One kernel.
#include "products/fp8.h"

namespace minifloat::torch_ops {
namespace fp8_tensor {

bool supports(const Product& product, int capability) {
  const auto &a = product.a, &b = product.b;
  return reads_fp8(capability) && a.rule == ScaleRule::kTensor && b.rule == ScaleRule::kTensor &&
         has_fp8_product(a, b);
}

bool takes(const Product&, int, const ProductShape& shape) { return takes_codes(shape); }

Tensor multiply(const ProductCall& call) {
  const Product& product = call.product;
  return fp8_product(fp8_side(product.a, call.a), fp8_side(product.b, call.b), false, product.fast,
                     call.result);
}

}  // namespace fp8_tensor

constinit const Engine kFp8Tensor = {.name = "fp8_tensor",
                                     .does = "an FP8 GEMM with a scale a tensor",
                                     .supports = fp8_tensor::supports,
                                     .takes = fp8_tensor::takes,
                                     .multiply = fp8_tensor::multiply};

}  // namespace minifloat::torch_ops
