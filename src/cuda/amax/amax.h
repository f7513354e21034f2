// What the amax kernels share.
#pragma once

#include "cuda/common/launch.h"
#include "minifloat/quantize.h"

namespace minifloat::cuda {

// One amax of x.   out: of a tensor or of rows as read, zero before
struct AmaxRequest {
  const TensorRef& x;
  const Spec& spec;
  bool columnwise;
  std::uint32_t* out;
  cudaStream_t stream;
};

// Raises `out` by the magnitudes of transformed values.
void launch_transformed(const AmaxRequest& request);

}  // namespace minifloat::cuda
