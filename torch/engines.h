// Which engine multiplies two quantized operands: one decision, shared by the products and the layers that feed them.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

#include "minifloat/recipe.h"

namespace minifloat::torch_ops {

enum class Engine {
  kExact,  // decoded values in bf16, fp32 sums, one rounding: any product, any sizes, any device
  kFp8Tensor,  // the codes themselves, by ATen's scaled products: one scale a tensor,
  kFp8Row,     //   one a row,
  kFp8Block,   //   one a 1x128 or 128x128 block
  kFp4ByFp8,  // FP4 under powers of two: the same values as FP8 codes under row scales, then as kFp8Row
};

// (m, k) · (n, k)ᵀ, where k is the length that the codes have, whole transforms included.
struct ProductShape {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  c10::ScalarType out_dtype = c10::ScalarType::BFloat16;
};

// The engine that a device has for a product, sizes apart: known before any size is, so that a traced graph is not
// tied to one. All but kExact read codes.
Engine engine_of(const Product& product, const c10::Device& device);

// The same, or kExact where that engine does not take the sizes.
Engine engine_of(const Product& product, const c10::Device& device, const ProductShape& shape);

}  // namespace minifloat::torch_ops
