// An operand as a block-scaled tensor-core product reads it: the codes in place, a scale for each
// of their blocks of one row, in the swizzled layout (core/swizzle.h), and NVFP4's tensor scale.
// Needs no GPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "minifloat/spec.h"

namespace minifloat::torch_ops {

using at::Tensor;

struct BlockScaledSide {
  Tensor codes;  // float8_e4m3fn or float8_e5m2 (rows, k); float4_e2m1fn_x2 (rows, k / 2)
  // float8_e8m0fnu or float8_e4m3fn, swizzled: (round_up(rows, 128), round_up(blocks of a row, 4)).
  // NVFP4: then fp32 (), the tensor's.
  std::vector<Tensor> scale;
  std::vector<std::int64_t> scaling;  // of each scale: at::blas::ScalingType
  std::vector<std::int64_t> swizzle;  //   and at::blas::SwizzleType
};

// codes uint8 (rows, code_cols), scale as `quantize` gives it; factor: of the tensor, for NVFP4.
BlockScaledSide block_scaled_side(const Spec& spec, const Tensor& codes, const Tensor& scale,
                                  const Tensor& factor);

}  // namespace minifloat::torch_ops
