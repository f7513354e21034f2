// Operands in the form that block-scaled tensor-core products read: the codes in place, a scale for
// each block of one row, in the swizzled layout (core/swizzle.h), and NVFP4's tensor scale. Made
// without a GPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "minifloat/spec.h"
#include "ops/groups.h"
#include "products/inputs.h"

namespace minifloat::torch_ops {

// One operand of a block-scaled product.
struct BlockScaledSide {
  Tensor codes;  // float8_e4m3fn or float8_e5m2 (rows, k); float4_e2m1fn_x2 (rows, k / 2)
  // float8_e8m0fnu or float8_e4m3fn, swizzled: (round_up(rows, 128), round_up(blocks of a row, 4)),
  // or with groups the shapes of the op swizzle_scales. NVFP4: then the tensor scale, fp32 (), or
  // one a group.
  std::vector<Tensor> scale;
  std::vector<std::int64_t> scaling;  // of each scale: at::blas::ScalingType
  std::vector<std::int64_t> swizzle;  //   and at::blas::SwizzleType
};

// Returns an operand in this form. codes: uint8 (rows, code_cols), or one matrix a group; scale: as
// `quantize` returns it; factor: the tensor scale of NVFP4; groups: of the rows or columns.
BlockScaledSide block_scaled_side(const Spec& spec, const Tensor& codes, const Tensor& scale,
                                  const Tensor& factor, const Groups& groups = {});
// The same of scales that a cast wrote in this form: nothing is launched.
BlockScaledSide block_scaled_side(const Spec& spec, const SwizzledCodes& in, const Tensor& factor);

}  // namespace minifloat::torch_ops
