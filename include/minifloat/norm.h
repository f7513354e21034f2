// Normalisations of rows, RMSNorm and LayerNorm, and their casts.
#pragma once

#include <cstdint>

#include "minifloat/core/norm.h"
#include "minifloat/quantize.h"
#include "minifloat/tensor_ref.h"

namespace minifloat {

// A normalisation of rows (core/norm.h). Strides of rows are in elements; columns are adjacent.
struct Norm {
  const void* x = nullptr;  // (rows, cols)
  DType dtype = DType::kFloat32;
  std::int64_t rows = 0, cols = 0, row_stride = 0;
  const void* weight = nullptr;  // (cols); null: ones
  DType weight_dtype = DType::kFloat32;
  const void* bias = nullptr;  // (cols), of a LayerNorm; null: none
  DType bias_dtype = DType::kFloat32;
  NormKind kind = NormKind::kRms;
  float eps = 0;
  Device device = Device::kCpu;

  // Returns contiguous values of the shape and dtype of y.
  TensorRef y_at(const void* y) const {
    return {.data = y,
            .dtype = dtype,
            .rows = rows,
            .cols = cols,
            .row_stride = cols,
            .device = device};
  }
};

// Writes y, rounded once more.   y: (rows, cols), contiguous, of the dtype
void norm(const Norm& of, void* y, const Execution& execution = {});

// Quantizes y in both directions, to the bytes that `quantize` makes of norm's y; null: that
// direction is not cast. A GPU writes no y where x is bf16 and a kernel for the specs and sizes is
// compiled.
void quantize_norm(const Norm& of, const Operand* rowwise, const Operand* columnwise,
                   const Execution& execution = {});

// Writes what backward needs of each row: 1 / √(…), and of a LayerNorm the mean.
//   factors, means: (rows); means may be null
void norm_statistics(const Norm& of, float* factors, float* means, const Execution& execution = {});

}  // namespace minifloat
