#include "products/engines.h"

#if defined(MINIFLOAT_WITH_CUDA)
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#endif

namespace minifloat::torch_ops {
namespace {

// cuBLAS multiplies FP8 by rows from Hopper on, by 128-blocks on Hopper alone; CUTLASS by rows from Blackwell on.
constexpr int kHopper = 90;
constexpr int kBlackwell = 100;
constexpr int kBlackwellUltra = 103;

// The GPUs whose tensor cores read block scales, of those that ATen's products and this build are for.
bool has_block_scales(int capability) {
  return capability == kBlackwell || capability == kBlackwellUltra;
}

// cuBLAS multiplies FP8 by FP8, but for E5M2 by E5M2.
bool has_fp8_product(const Spec& a, const Spec& b) {
  return a.is_fp8() && b.is_fp8() &&
         (a.elements == Elements::kE4m3 || b.elements == Elements::kE4m3);
}

// MX by MX and NVFP4 by NVFP4 of the same width. Their rounding, transform and the height of a block are no matter.
bool has_block_scaled_product(const Spec& a, const Spec& b) {
  const bool is_fp4 = a.elements == Elements::kE2m1 && b.elements == Elements::kE2m1;
  return a.rule == b.rule && ((a.rule == ScaleRule::kMx && (is_fp4 || has_fp8_product(a, b))) ||
                              a.rule == ScaleRule::kNvfp4);
}

// FP4 operands whose values FP8 codes have as well (core/carry.h).
bool has_fp4_by_fp8_product(const Spec& a, const Spec& b) {
  return a.rule == b.rule && a.is_fp4_by_powers_of_two() && b.is_fp4_by_powers_of_two();
}

bool is_square(const Spec& spec) { return spec.block_rows > 1; }

// Rows of codes and of the bf16 result start at multiples of 16 bytes.
bool takes_fp8(const ProductShape& shape) {
  return shape.m > 0 && shape.n > 0 && shape.k > 0 && shape.n % 16 == 0 && shape.k % 16 == 0;
}

bool takes_rows(const ProductShape& shape, int capability) {
  const bool writes = capability < kBlackwell || shape.out_dtype == c10::ScalarType::BFloat16;
  return takes_fp8(shape) && writes;
}

// Whole blocks; scales by columns, each of which starts at 16 bytes.
bool takes_blocks(const Product& product, const ProductShape& shape) {
  const std::int64_t a_rows = is_square(product.a) ? 128 : 4,
                     b_rows = is_square(product.b) ? 128 : 4;
  return takes_fp8(shape) && shape.k % 128 == 0 && shape.m % a_rows == 0 && shape.n % b_rows == 0;
}

// Whole blocks of 32, which are also 16 bytes of E2M1. ATen's product of MXFP4 writes bf16 alone, and drops a bias.
bool takes_block_scaled(const Product& product, const ProductShape& shape) {
  const bool is_mxfp4 = product.a.rule == ScaleRule::kMx && product.a.elements == Elements::kE2m1;
  const bool writes =
      !is_mxfp4 || (shape.out_dtype == c10::ScalarType::BFloat16 && !shape.has_bias);
  return takes_fp8(shape) && shape.k % 32 == 0 && writes && !shape.has_fp4_as_fp8;
}

}  // namespace

int compute_capability(const c10::Device& device) {
#if defined(MINIFLOAT_WITH_CUDA)
  if (!device.is_cuda()) return 0;
  static std::array<std::atomic<int>, 64> known = {};  // 0: not asked yet
  const int index = device.has_index() ? device.index() : 0;
  std::atomic<int>& capability = known[static_cast<std::size_t>(index) % known.size()];
  if (capability == 0) {
    int major = 0, minor = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index) != cudaSuccess)
      return 0;
    capability = major * 10 + minor;
  }
  return capability;
#else
  (void)device;
  return 0;
#endif
}

Engine engine_of(const Product& product, int capability) {
  const Spec &a = product.a, &b = product.b;
  if (capability < kHopper) return Engine::kExact;
  if (has_block_scales(capability) && has_block_scaled_product(a, b)) return Engine::kBlockScaled;
  if (has_fp4_by_fp8_product(a, b)) return Engine::kFp4ByFp8;
  if (a.rule != b.rule || !has_fp8_product(a, b)) return Engine::kExact;
  switch (a.rule) {
    case ScaleRule::kTensor: return Engine::kFp8Tensor;
    case ScaleRule::kRow: return Engine::kFp8Row;
    case ScaleRule::kBlock:  // of which cuBLAS pairs all but two square ones
      return capability < kBlackwell && !(is_square(a) && is_square(b)) ? Engine::kFp8Block
                                                                        : Engine::kExact;
    case ScaleRule::kNone:
    case ScaleRule::kMx:
    case ScaleRule::kNvfp4: break;
  }
  return Engine::kExact;
}

Engine engine_of(const Product& product, int capability, const ProductShape& shape) {
  Engine engine = engine_of(product, capability);
  if (engine == Engine::kBlockScaled && !takes_block_scaled(product, shape))
    engine = has_fp4_by_fp8_product(product.a, product.b) ? Engine::kFp4ByFp8 : Engine::kExact;
  const bool takes = engine == Engine::kFp8Tensor  ? takes_fp8(shape)
                     : engine == Engine::kFp8Block ? takes_blocks(product, shape)
                     : engine == Engine::kFp8Row || engine == Engine::kFp4ByFp8
                         ? takes_rows(shape, capability)
                         : true;
  return takes ? engine : Engine::kExact;
}

PlannedProduct plan_product(const Product& product, const std::string& text,
                            const c10::Device& device) {
  const int capability = compute_capability(device);
  return {product, text, capability, engine_of(product, capability)};
}

}  // namespace minifloat::torch_ops
