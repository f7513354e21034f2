// The kernels' view of x.
#pragma once

#include <algorithm>
#include <cstdint>

#include "minifloat/core/block.h"
#include "minifloat/tensor_ref.h"

namespace minifloat::cuda {

struct KernelInput {
  const void* data;
  std::int64_t batch_stride, row_stride;  // elements
  std::int64_t rows, cols;
  // Whether 16 elements that start at a multiple of 16 columns start at a multiple of 16 bytes.
  bool aligned;
  const std::int32_t* rows_from;  // of each row, its row at `data`; null: its position
  std::uint32_t last_row;         // at `data`, of those that rows_from names
};

inline KernelInput kernel_input(const TensorRef& x) {
  const std::int64_t size = x.dtype == DType::kFloat32 ? 4 : 2;
  const bool aligned = x.data && reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0 &&
                       ((x.rows <= 1 && !x.rows_from) || x.row_stride * size % 16 == 0) &&
                       (x.batch <= 1 || x.batch_stride * size % 16 == 0);
  // Groups are numbered as the matrices of a batch, and lie in one matrix.
  const std::int64_t batch_stride = x.groups ? 0 : x.batch_stride;
  return {x.data,
          batch_stride,
          x.row_stride,
          x.rows,
          x.cols,
          aligned,
          x.rows_from,
          static_cast<std::uint32_t>(std::clamp<std::int64_t>(x.from_rows - 1, 0, 0x7FFF'FFFF))};
}

}  // namespace minifloat::cuda
