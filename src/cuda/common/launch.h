// The host's part of every launch: errors as exceptions, scratch on the stream, and the supported
// GPUs.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "minifloat/error.h"
#include "minifloat/tensor_ref.h"

namespace minifloat::cuda {

inline void check(cudaError_t status, const char* what) {
  MINIFLOAT_CHECK(status == cudaSuccess, what, ": ", cudaGetErrorString(status));
}
// Raises the error of a kernel without code for the current device: its GPU, the targets of this
// build, and the command that builds for it.
[[noreturn]] void raise_missing_target(const char* kernel);

// Checks the last launch.
inline void check_launch(const char* kernel) {
  const cudaError_t status = cudaGetLastError();
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction)
    raise_missing_target(kernel);
  check(status, kernel);
}

// Returns the target, 10 major + minor, whose code of a kernel the current device runs: its own, an
// earlier one, or that of PTX that its driver compiled. 0: there is none.
template <class Kernel>
int target_of(Kernel kernel) {
  cudaFuncAttributes attributes = {};
  const bool has_code = cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess;
  if (!has_code) cudaGetLastError();  // a launch raises the error
  return has_code ? attributes.ptxVersion : 0;
}

inline cudaStream_t cuda_stream(const Execution& execution) {
  return static_cast<cudaStream_t>(execution.stream);
}

// Device memory that the kernels of one call share, allocated and freed in stream order.
class Scratch {
 public:
  Scratch(std::size_t bytes, const Execution& execution) : stream_(cuda_stream(execution)) {
    if (bytes == 0) return;
    if (execution.allocate) {
      memory_ = execution.allocate(bytes, execution.allocate_context);
      MINIFLOAT_CHECK(memory_, "Execution::allocate: expected ", bytes, " bytes, got null");
      return;
    }
    check(cudaMallocAsync(&memory_, bytes, stream_), "scratch");
    is_allocated_ = true;
  }
  ~Scratch() {
    if (is_allocated_) cudaFreeAsync(memory_, stream_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(memory_);
  }

 private:
  cudaStream_t stream_;
  void* memory_ = nullptr;
  bool is_allocated_ = false;
};

// Returns the blocks of a one-dimensional grid; 0: there is nothing to launch.
inline unsigned grid_of(std::int64_t blocks, const char* kernel) {
  MINIFLOAT_CHECK(blocks <= 0x7FFF'FFFF, kernel, ": expected at most 2^31 - 1 tiles, got ", blocks);
  return static_cast<unsigned>(blocks);
}

}  // namespace minifloat::cuda
