#include "cuda/common/launch.h"

namespace minifloat::cuda {

void raise_missing_target(const char* kernel) {
  int device = 0;
  cudaDeviceProp gpu = {};
  check(cudaGetDevice(&device), kernel);
  check(cudaGetDeviceProperties(&gpu, device), kernel);
  fail(kernel, ": expected a GPU that this build has code for (", MINIFLOAT_CUDA_TARGETS, "), got ",
       gpu.name, " of compute capability ", gpu.major, ".", gpu.minor,
       ". This builds for it, in a clone of the repository on this machine: pip install .");
}

}  // namespace minifloat::cuda
