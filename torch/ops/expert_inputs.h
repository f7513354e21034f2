// Checks of the inputs of what lies between the products of experts.
#pragma once

#include <ATen/ATen.h>

#include "ops/bridge.h"

namespace minifloat::torch_ops {

using at::Tensor;

// Returns t with adjacent elements in each row: itself, or a copy.
inline Tensor adjacent(const Tensor& t) {
  return t.size(-1) <= 1 || t.stride(-1) == 1 ? t : t.contiguous();
}

// Requires fp32 or bf16 of two dimensions.
inline void check_matrix(const char* op, const char* name, const Tensor& t) {
  bridge::check_value_dtype(op, name, t);
  TORCH_CHECK_VALUE(t.dim() == 2, op, ": expected ", name, " of 2 dimensions, got ", t.dim());
  bridge::check_sizes(op, name, t);
}

// Requires int32 of `dims` dimensions on the device of `like`.
inline void check_index(const char* op, const char* name, const Tensor& t, std::int64_t dims,
                        const Tensor& like) {
  TORCH_CHECK_VALUE(t.scalar_type() == at::kInt && t.dim() == dims, op, ": expected ", name,
                    " as int32 of ", dims, dims == 1 ? " dimension" : " dimensions", ", got ",
                    t.scalar_type(), " of ", t.dim());
  bridge::check_sizes(op, name, t);
  TORCH_CHECK_VALUE(t.device() == like.device(), op, ": expected ", name, " on ", like.device(),
                    ", got ", t.device());
}

}  // namespace minifloat::torch_ops
