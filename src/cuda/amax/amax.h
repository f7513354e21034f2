// What the amax kernels share.
#pragma once

#include "cuda/common/launch.h"
#include "minifloat/quantize.h"

namespace minifloat::cuda {

// Untransformed amaxes of a matrix. Zero before.
struct UntransformedAmaxes {
  std::uint32_t* tensor;  // null: none is written
  std::uint32_t* rows;    // null: not written
};

// One amax of x.   out: of a tensor or of rows as read, zero before
struct AmaxRequest {
  const TensorRef& x;
  const AmaxOf& of;
  std::uint32_t* out;
  cudaStream_t stream;
  // Of a transformed columnwise operand of a matrix with a tensor's amax: what the same read finds.
  std::uint32_t* rows = nullptr;  // the amaxes of its rows as read
  UntransformedAmaxes untransformed = {};
};

// Raises `out` by the magnitudes of transformed values.
void launch_transformed(const AmaxRequest& request);

// The amaxes that a cast to NVFP4 reads where it writes rows as FP8, of a bf16 matrix. All are zero
// before; null: not written.
struct AmaxesOfRows {
  UntransformedAmaxes untransformed;
  std::uint32_t* columns;         // of the columnwise operand's rows
  const AmaxOf* transformed;      // the columnwise operand; null: it is not transformed
  std::uint32_t* of_transformed;  // the tensor amax of transformed columns
};
// Raises them, from one read.
void amaxes_of_rows(const TensorRef& x, const AmaxesOfRows& of, const Execution& execution);

}  // namespace minifloat::cuda
