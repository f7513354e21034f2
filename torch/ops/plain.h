// Earlier names of the functions of ops/direct.h, which torch/layers still calls.
#pragma once

#include "ops/direct.h"

namespace minifloat::torch_ops {

inline bool is_plain(std::initializer_list<const Tensor*> tensors) {
  return can_skip_dispatcher(tensors);
}

inline Tensor plain_view(const Tensor& t, at::ScalarType dtype, at::IntArrayRef sizes,
                         at::IntArrayRef strides, std::int64_t offset) {
  return direct_view(t, dtype, sizes, strides, offset);
}

inline Tensor plain_view(const Tensor& t, at::ScalarType dtype, at::IntArrayRef sizes,
                         std::int64_t offset) {
  return direct_view(t, dtype, sizes, offset);
}

inline Tensor plain_transpose(const Tensor& matrix) { return direct_transpose(matrix); }

}  // namespace minifloat::torch_ops
