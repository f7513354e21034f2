// The engine for FP8 codes under scales of 1x128 or 128x128 blocks, on Hopper: cuBLASLt's scaled
// product, or ATen's. One kernel, after a transpose of the scales of 1x128 blocks.
#include <ATen/ATen.h>
#include <ATen/BlasBackend.h>

#include "minifloat/core/block.h"
#include "ops/direct.h"
#include "products/cublaslt.h"
#include "products/epilogue.h"
#include "products/fp8.h"

namespace minifloat::torch_ops {
namespace fp8_block {

bool is_2d(const Spec& spec) { return spec.block_rows > 1; }

// cuBLAS multiplies all pairs of blocks except 128x128 by 128x128.
bool supports(const Product& product, int capability) {
  const auto &a = product.a, &b = product.b;
  return capability == kHopper && a.rule == ScaleRule::kBlock && b.rule == ScaleRule::kBlock &&
         has_fp8_product(a, b) && !(is_2d(a) && is_2d(b));
}

// Whether sizes are multiples of the blocks, and columns of scales start at multiples of 16 bytes.
bool takes(const Product& product, int, const ProductShape& shape) {
  const std::int64_t a_rows = is_2d(product.a) ? 128 : 4, b_rows = is_2d(product.b) ? 128 : 4;
  return takes_codes(shape) && shape.k % 128 == 0 && shape.m % a_rows == 0 && shape.n % b_rows == 0;
}

// Views contiguous (cols, rows) as (rows, cols). Sets the strides that cuBLAS checks, also where a
// size is one.
Tensor as_columns(const Tensor& t, std::int64_t cols, std::int64_t rows) {
  return direct_view(t, t.scalar_type(), {rows, cols}, {1, rows}, t.storage_offset());
}

// Returns scales of blocks (outer, L) as cuBLAS reads them. 1x128: (outer, L), outer adjacent,
// which takes a transpose. 128x128: (L4, outer), L adjacent and padded to L4, a multiple of 4.
// Where L is one, nothing is padded.
Tensor block_scale(const Spec& spec, const Fp8Side& side) {
  const Tensor scale =
      scale_view(side, {spec.scale_rows(side.codes.size(0)), spec.scale_cols(side.codes.size(1))});
  const std::int64_t outer = scale.size(0), length = scale.size(1);
  if (!is_2d(spec)) return as_columns(direct_transpose(scale).contiguous(), length, outer);
  const std::int64_t padded = round_up<std::int64_t>(length, 4);
  const Tensor rows = padded == length ? scale : at::constant_pad_nd(scale, {0, padded - length});
  return as_columns(rows, outer, padded);
}

ScaleMode mode_of(const Spec& spec) {
  return is_2d(spec) ? ScaleMode::kBlocks128x128 : ScaleMode::kBlocks1x128;
}

std::int64_t scaling_of(const Spec& spec) {
  return static_cast<std::int64_t>(is_2d(spec) ? at::blas::ScalingType::BlockWise128x128
                                               : at::blas::ScalingType::BlockWise1x128);
}

Tensor aten_product(const Product& product, const Tensor& a, const Tensor& a_scale, const Tensor& b,
                    const Tensor& b_scale, at::ScalarType dtype) {
  const std::int64_t no_swizzle = static_cast<std::int64_t>(at::blas::SwizzleType::NO_SWIZZLE);
  return at::_scaled_mm_v2(a, direct_transpose(b), {a_scale}, {scaling_of(product.a)}, {no_swizzle},
                           {b_scale}, {scaling_of(product.b)}, {no_swizzle}, std::nullopt, dtype);
}

// Multiplies without fast accumulation, which product.fast permits and does not require.
Tensor multiply(const ProductCall& call) {
  const Product& product = call.product;
  const Fp8Side a = fp8_side(product.a, call.a), b = fp8_side(product.b, call.b);
  const Tensor left = fp8_view(a), right = fp8_view(b);
  const Tensor a_scale = block_scale(product.a, a), b_scale = block_scale(product.b, b);
  const Request request = request_of(call.result, false);
  const auto found =
      product_of_codes({left, a_scale, mode_of(product.a)}, {right, b_scale, mode_of(product.b)},
                       false, {request.bias, request.dtype, call.result.sum});
  const Tensor out =
      found ? *found : aten_product(product, left, a_scale, right, b_scale, request.dtype);
  return request.is_whole ? out : add_bias(out, call.result);
}

}  // namespace fp8_block

constinit const Engine kFp8Block = {.name = "fp8_block",
                                    .does = "an FP8 GEMM with scales of blocks of 128",
                                    .supports = fp8_block::supports,
                                    .takes = fp8_block::takes,
                                    .multiply = fp8_block::multiply};

}  // namespace minifloat::torch_ops
