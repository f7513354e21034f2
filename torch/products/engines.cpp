#include "products/engines.h"

#include <array>
#include <atomic>

#if defined(MINIFLOAT_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace minifloat::torch_ops {
namespace {

// All engines, in order of preference. Which one multiplies a preset on which GPU: mf.engines, and
// section 9 of docs/numerics.md.
constexpr const Engine* kEngines[] = {
    &kBlockScaled,         &kFp4ByFp8,         &kFp8Tensor,          &kFp8Row,         &kFp8Block,
    &kExactCuda,           &kExactCpu,         &kBlockScaledGrouped, &kCutlassGrouped, &kFp8Grouped,
    &kCutlassGroupedExact, &kExactGroupedCuda, &kExactGroupedCpu};

std::atomic<int> assumed = kNoGpu;

}  // namespace

void assume_capability(int capability) { assumed = capability; }

int compute_capability(const c10::Device& device) {
  if (!device.is_cuda()) return kNoGpu;
  if (const int capability = assumed) return capability;
#if defined(MINIFLOAT_WITH_CUDA)
  static std::array<std::atomic<int>, 64> cache = {};  // 0: not queried
  const int index = device.has_index() ? device.index() : 0;
  std::atomic<int>& capability = cache[static_cast<std::size_t>(index) % cache.size()];
  if (capability == 0) {
    int major = 0, minor = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index) != cudaSuccess)
      return kUnknownGpu;
    capability = major * 10 + minor;
  }
  return capability;
#else
  return kUnknownGpu;
#endif
}

const Engine& engine_of(const Product& product, int capability, bool is_grouped) {
  for (const Engine* engine : kEngines)
    if (engine->is_grouped == is_grouped && engine->supports(product, capability)) return *engine;
  return is_grouped ? kExactGroupedCpu : kExactCpu;
}

const Engine& engine_of(const Product& product, int capability, const ProductShape& shape) {
  const bool is_grouped = shape.along != GroupsAlong::kNone;
  for (const Engine* engine : kEngines)
    if (engine->is_grouped == is_grouped && engine->supports(product, capability) &&
        engine->takes(product, capability, shape))
      return *engine;
  return is_grouped ? kExactGroupedCpu : kExactCpu;
}

PlannedProduct plan_product(const Product& product, const std::string& text,
                            const c10::Device& device, bool is_grouped) {
  const int capability = compute_capability(device);
  return {product, text, capability, engine_of(product, capability, is_grouped)};
}

}  // namespace minifloat::torch_ops
