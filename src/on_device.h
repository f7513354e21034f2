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

inline void check_device(const char* function, Device device) {
#if defined(MINIFLOAT_WITH_CUDA)
  MINIFLOAT_CHECK(device == Device::kCpu || device == Device::kCuda, function,
                  ": expected the device kCpu or kCuda, got ", static_cast<int>(device));
#else
  MINIFLOAT_CHECK(
      device == Device::kCpu, function,
      ": expected a tensor on the CPU, got one on CUDA: this build has no CUDA backend");
#endif
}

}  // namespace minifloat
