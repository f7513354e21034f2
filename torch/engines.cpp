#include "engines.h"

#if defined(MINIFLOAT_WITH_CUDA)
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#endif

namespace minifloat::torch_ops {
namespace {

// cuBLAS multiplies FP8 by rows from Hopper on, by 128-blocks on Hopper alone.
constexpr int kHopper = 90;
constexpr int kBlackwell = 100;

// major * 10 + minor; 0 where there is no such device, or no CUDA backend. Asked once a device.
int compute_capability(const c10::Device& device) {
#if defined(MINIFLOAT_WITH_CUDA)
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

// cuBLAS multiplies FP8 by FP8, but for E5M2 by E5M2.
bool has_fp8_product(const Spec& a, const Spec& b) {
  return a.is_fp8() && b.is_fp8() &&
         (a.elements == Elements::kE4m3 || b.elements == Elements::kE4m3);
}

// FP4 operands that FP8 codes carry (core/carry.h).
bool is_carried(const Spec& a, const Spec& b) {
  return a.is_fp4_by_powers_of_two() && b.is_fp4_by_powers_of_two();
}

bool is_square(const Spec& spec) { return spec.block_rows > 1; }

}  // namespace

Engine engine_of(const Product& product, const c10::Device& device) {
  const Spec &a = product.a, &b = product.b;
  const bool carried = is_carried(a, b);
  if (!device.is_cuda() || a.rule != b.rule || !(carried || has_fp8_product(a, b)))
    return Engine::kExact;
  const int capability = compute_capability(device);
  if (capability < kHopper) return Engine::kExact;
  if (carried) return Engine::kFp4ByFp8;
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

Engine engine_of(const Product& product, const c10::Device& device, const ProductShape& shape) {
  const Engine engine = engine_of(product, device);
  if (engine == Engine::kExact) return engine;
  // Rows of codes, and of the bf16 result, start at multiples of 16 bytes.
  bool takes = shape.m > 0 && shape.n > 0 && shape.k > 0 && shape.n % 16 == 0 && shape.k % 16 == 0;
  const bool by_rows = engine == Engine::kFp8Row || engine == Engine::kFp4ByFp8;
  if (by_rows && shape.out_dtype == c10::ScalarType::Float)
    takes = takes && compute_capability(device) < kBlackwell;
  if (engine ==
      Engine::kFp8Block) {  // whole blocks; scales by columns, each of which starts at 16 bytes
    const std::int64_t a_rows = is_square(product.a) ? 128 : 4,
                       b_rows = is_square(product.b) ? 128 : 4;
    takes = takes && shape.k % 128 == 0 && shape.m % a_rows == 0 && shape.n % b_rows == 0;
  }
  return takes ? engine : Engine::kExact;
}

}  // namespace minifloat::torch_ops
