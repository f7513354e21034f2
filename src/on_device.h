// The choice of the backend by a device's memory. Both backends have the same functions. A build
// without nvcc has only the CPU's.
#pragma once

#include "minifloat/error.h"
#include "minifloat/tensor_ref.h"

#if defined(MINIFLOAT_WITH_CUDA)
#define MINIFLOAT_ON(device, call) return (device) == Device::kCuda ? cuda::call : cpu::call
#else
#define MINIFLOAT_ON(device, call) return cpu::call
#endif

namespace minifloat {

inline void check_device([[maybe_unused]] const char* function, [[maybe_unused]] Device device) {
#if !defined(MINIFLOAT_WITH_CUDA)
  MINIFLOAT_CHECK(
      device == Device::kCpu, function,
      ": expected a tensor on the CPU, got one on CUDA: this build has no CUDA backend");
#endif
}

}  // namespace minifloat
