// Engines: the implementations of the product of two quantized operands. Each is one Engine, in a
// file of its own. engines.cpp lists them in order of preference.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>

#include "minifloat/recipe.h"
#include "ops/groups.h"
#include "products/inputs.h"

namespace minifloat::torch_ops {

// Compute capabilities, 10 major + minor.
inline constexpr int kNoGpu = 0;
inline constexpr int kUnknownGpu = 1;  // a GPU whose capability this build cannot query
inline constexpr int kAda = 89;        // RTX 40, L4, L40
inline constexpr int kHopper = 90;
inline constexpr int kBlackwell = 100;       // B200
inline constexpr int kBlackwellUltra = 103;  // B300
inline constexpr int kRtxBlackwell = 120;    // RTX 50, RTX PRO
inline constexpr int kDgxSpark = 121;
// GPUs whose products differ. Those of 8.0 and 8.6 read no codes.
inline constexpr int kGpus[] = {kAda,          kHopper,  kBlackwell, kBlackwellUltra,
                                kRtxBlackwell, kDgxSpark};

// The dimension of a product along which groups of rows lie (core/groups.h).
//
//     kRows          (M, k) · (E, n, k)ᵀ -> (M, n)         rows of group e times matrix e
//     kContraction   (m, K) · (n, K)ᵀ    -> (E, m, n)      a product for the columns of each group
enum class GroupsAlong : std::uint8_t { kNone, kRows, kContraction };

// The sizes of (m, k) · (n, k)ᵀ and the form of its operands and result. k is padded to whole
// transforms, and to the groups' units.
struct ProductShape {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  c10::ScalarType out_dtype = c10::ScalarType::BFloat16;
  bool has_bias = false;
  bool has_codes = true;  // both operands are contiguous codes that begin at a multiple of 16 bytes
  bool has_bf16_rows = true;  // both are contiguous bf16 rows at such multiples, or decode to them
  bool has_fp4_as_fp8 = false;  // an operand is FP8 codes of FP4 values already
  GroupsAlong along = GroupsAlong::kNone;
};

// The bias of a product, and the dtype of its result.
struct Result {
  const std::optional<Tensor>& bias;  // (n)
  at::ScalarType dtype;               // float32 or bfloat16
  // fp32 (m, n), contiguous: an engine may add the product to it and return it. The dtype is then
  // fp32, without bias. Null: none.
  const Tensor* sum = nullptr;
};

// The arguments of a product, after their checks.
struct ProductCall {
  const Product& product;
  const ProductInput &a, &b;
  std::int64_t k;  // of the operands, without a transform's padding
  const Result& result;
  const Groups& groups;  // of grouped engines; unit: of the columns, or 0 along rows
};

// A way to multiply two quantized operands.
struct Engine {
  const char* name;
  const char* does;  // for users: which GEMM
  // Whether the engine multiplies operands with groups, along either dimension.
  bool is_grouped = false;
  // Whether the engine multiplies the product's operands on a GPU of this capability. Independent
  // of sizes, so that a traced graph is valid for all sizes.
  bool (*supports)(const Product& product, int capability);
  // Whether the engine, where it is supported, accepts these sizes and this result.
  bool (*takes)(const Product& product, int capability, const ProductShape& shape);
  // Whether the engine reads decoded values. A cast directly before the product then writes them
  // beside the codes.
  bool reads_values = false;
  // Whether the engine reads FP4 codes as FP8 (Fp4AsFp8), and so as a cast may write them.
  bool reads_fp4_as_fp8 = false;
  // Whether the engine reads swizzled scales (SwizzledCodes), and so as a cast may write them.
  bool reads_swizzled = false;
  // Returns codes in the form that the engine reads, for an operand of several products. Null: the
  // engine reads the output of a cast.
  ProductInput (*prepare)(const Spec& spec, const Codes& codes, const c10::SymInt& cols) = nullptr;
  // Returns a · bᵀ, (m, n), of any strides, or result.sum after adding a · bᵀ to it. Prepares
  // operands that are not prepared.
  Tensor (*multiply)(const ProductCall& call);
};

extern const Engine kBlockScaled, kFp4ByFp8, kFp8Tensor, kFp8Row, kFp8Block, kExactCuda, kExactCpu;
extern const Engine kBlockScaledGrouped, kCutlassGrouped, kFp8Grouped, kCutlassGroupedExact,
    kExactGroupedCuda, kExactGroupedCpu;

// Returns the capability of a CUDA device, queried once for each device; kNoGpu for the CPU.
int compute_capability(const c10::Device& device);
// Makes compute_capability return this for every CUDA device, so that tests visit the engines of
// other GPUs; kNoGpu: the device's own again.
void assume_capability(int capability);

// Returns the first engine that supports a product on a GPU of this capability.
const Engine& engine_of(const Product& product, int capability, bool is_grouped = false);

// Returns the first engine that also accepts the sizes. The exact engines accept all.
const Engine& engine_of(const Product& product, int capability, const ProductShape& shape);

// A product and the first engine that supports it on a device, for which its operands are cast. The
// product itself may be another engine's, whose sizes fit.
struct PlannedProduct {
  const Product& product;
  const std::string& text;  // of the product
  int capability;
  const Engine& engine;

  // Returns whether casts write decoded values for the product: in bf16. It decodes fp32 values
  // itself.
  bool reads_values() const {
    return engine.reads_values && !product.a.has_fp32_values() && !product.b.has_fp32_values();
  }
  // Returns the engine, or the next one that accepts the sizes.
  const Engine& engine_for(const ProductShape& shape) const {
    return engine.takes(product, capability, shape) ? engine
                                                    : engine_of(product, capability, shape);
  }
};
PlannedProduct plan_product(const Product& product, const std::string& text,
                            const c10::Device& device, bool is_grouped = false);

}  // namespace minifloat::torch_ops
