// Which engine multiplies two quantized operands: one decision, shared by the products and the layers that feed them.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>

#include "minifloat/recipe.h"

namespace minifloat::torch_ops {

enum class Engine {
  kExact,  // decoded values in bf16, fp32 sums, one rounding: any product, any sizes, any device
  kFp8Tensor,  // the codes themselves, by ATen's scaled products: one scale a tensor,
  kFp8Row,     //   one a row,
  kFp8Block,   //   one a 1x128 or 128x128 block
  kFp4ByFp8,  // FP4 under powers of two: the same values as FP8 codes under row scales, then as kFp8Row
  kBlockScaled,  // MX and NVFP4 codes themselves, by ATen's block-scaled products.   Not yet run on hardware
};

// (m, k) · (n, k)ᵀ, where k is the length that the codes have, whole transforms included, and what is asked of it.
struct ProductShape {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  c10::ScalarType out_dtype = c10::ScalarType::BFloat16;
  bool has_bias = false;
  bool has_fp4_as_fp8 = false;  // an operand is FP8 codes of FP4 values already
};

// 10 major + minor of a CUDA device, asked once a device; 0 where there is none, or no CUDA backend.
int compute_capability(const c10::Device& device);

// The engine that a GPU of this capability has for a product, sizes apart: known before any size is, so that a traced
// graph is not tied to one. All but kExact read codes. 0: no GPU.
Engine engine_of(const Product& product, int capability);

// The same, or the next best where that engine does not take the sizes; kExact takes all.
Engine engine_of(const Product& product, int capability, const ProductShape& shape);

// A product and the engine that a device has for it, chosen once: by specs and device alone, so that a trace holds for
// any size.
struct PlannedProduct {
  const Product& product;
  const std::string& text;  // of the product
  int capability;
  Engine engine;

  // Whether the operands are best given as the values that an exact product reads.
  bool reads_values() const { return engine == Engine::kExact; }
};
PlannedProduct plan_product(const Product& product, const std::string& text,
                            const c10::Device& device);

}  // namespace minifloat::torch_ops
