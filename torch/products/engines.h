// The engines: what multiplies two quantized operands. Each has a file of its own, which fills one
// Engine; engines.cpp lists them in order of preference.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>

#include "minifloat/recipe.h"
#include "products/inputs.h"

namespace minifloat::torch_ops {

// Compute capabilities, 10 major + minor.
inline constexpr int kNoGpu = 0;
inline constexpr int kUnknownGpu = 1;  // a GPU, in a build without the CUDA backend
inline constexpr int kHopper = 90;
inline constexpr int kBlackwell = 100;
inline constexpr int kBlackwellUltra = 103;

// The sizes of (m, k) · (n, k)ᵀ and the form of its operands and result. k counts whole transforms.
struct ProductShape {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  c10::ScalarType out_dtype = c10::ScalarType::BFloat16;
  bool has_bias = false;
  bool has_codes = true;  // both operands are contiguous codes that begin at a multiple of 16 bytes
  bool has_fp4_as_fp8 = false;  // an operand is FP8 codes of FP4 values already
};

// The bias of a product, and the dtype of its result.
struct Result {
  const std::optional<Tensor>& bias;  // (n)
  at::ScalarType dtype;               // float32 or bfloat16
};

// A product whose arguments are checked.
struct ProductCall {
  const Product& product;
  const ProductInput &a, &b;
  std::int64_t k;  // of the operands, without a transform's padding
  const Result& result;
};

struct Engine {
  const char* name;
  // Whether a GPU of this capability has the engine for the product. It does not depend on sizes,
  // so that a traced graph holds for any.
  bool (*supports)(const Product& product, int capability);
  // Whether a supported engine takes these sizes and this result.
  bool (*takes)(const Product& product, int capability, const ProductShape& shape);
  // Whether the engine reads decoded values. A cast that the product follows at once then writes
  // them beside the codes.
  bool reads_values;
  // Returns codes as the engine reads them, for an operand of several products. Null: the engine
  // reads what casts write.
  ProductInput (*prepare)(const Spec& spec, const Codes& codes, const c10::SymInt& cols);
  // Returns a · bᵀ, (m, n). Prepares the operands that are not.
  Tensor (*multiply)(const ProductCall& call);
};

extern const Engine kBlockScaled, kFp4ByFp8, kFp8Tensor, kFp8Row, kFp8Block, kExactCuda, kExactCpu;

// The capability of a CUDA device, asked once a device; kNoGpu of the CPU.
int compute_capability(const c10::Device& device);

// Returns the first engine that a GPU of this capability has for a product.
const Engine& engine_of(const Product& product, int capability);

// Returns the first that takes the sizes too; an exact one takes all.
const Engine& engine_of(const Product& product, int capability, const ProductShape& shape);

// A product and the engine that a device has for it, chosen once.
struct PlannedProduct {
  const Product& product;
  const std::string& text;  // of the product
  int capability;
  const Engine& engine;

  bool reads_values() const { return engine.reads_values; }
  // Returns the engine, or the next one that takes the sizes.
  const Engine& engine_for(const ProductShape& shape) const {
    return engine.takes(product, capability, shape) ? engine
                                                    : engine_of(product, capability, shape);
  }
};
PlannedProduct plan_product(const Product& product, const std::string& text,
                            const c10::Device& device);

}  // namespace minifloat::torch_ops
