// The engine for codes under block scales, on Blackwell: swizzles the scales that no cast wrote so,
// and calls ATen's block-scaled product. The op block_scaled_operand returns one operand of it. Not
// yet run on hardware.
#include "products/block_scaled.h"

#include <ATen/ATen.h>
#include <ATen/BlasBackend.h>

#include "minifloat/core/swizzle.h"
#include "ops/as_read.h"
#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/op.h"
#include "ops/ops.h"
#include "ops/outputs.h"
#include "products/epilogue.h"
#include "products/fp8.h"
#include "products/grouped.h"
#include "products/tensor_factor.h"

namespace minifloat {
namespace torch_ops {
namespace {

using at::blas::ScalingType;
using at::blas::SwizzleType;

at::ScalarType code_type(const Spec& spec) {
  switch (spec.elements) {
    case Elements::kE4m3: return at::kFloat8_e4m3fn;
    case Elements::kE5m2: return at::kFloat8_e5m2;
    case Elements::kE2m1: return at::kFloat4_e2m1fn_x2;
    case Elements::kE1m2:
    case Elements::kBf16: break;
  }
  TORCH_INTERNAL_ASSERT(false, "no tensor core reads codes of ", spec.str());
}

// Returns one scale for each block of one row: repeats the scale of a 2D block for each of its
// rows.
Tensor scale_of_rows(const Spec& spec, const Tensor& scale, const c10::SymInt& rows) {
  if (spec.block_rows == 1) return scale;
  c10::SymDimVector shape(scale.sym_sizes().begin(), scale.sym_sizes().end());
  shape.insert(shape.end() - 1, c10::SymInt(spec.block_rows));
  return scale.unsqueeze(-2)
      .expand_symint(shape)
      .flatten(-3, -2)
      .narrow_symint(-2, 0, rows)
      .contiguous();
}

// Returns the scales of rows in the layout of the tensor cores, which begins anew in each group.
Tensor swizzle(const Spec& spec, const Tensor& scale, const Groups& groups) {
  if (!groups.table) return swizzle_scales(scale);
  const Tensor ends = ends_of(groups, groups.unit);
  if (groups.unit == 0) return swizzle_scales(scale, ends, "m");
  return swizzle_scales(scale, ends.floor_divide(spec.block_cols), "k");
}

// blocks: the scales in that layout
BlockScaledSide side_of_blocks(const Spec& spec, const Tensor& codes, const Tensor& blocks,
                               const Tensor& factor) {
  const bool is_mx = spec.rule == ScaleRule::kMx;
  BlockScaledSide side = {.codes = codes.view(code_type(spec)),
                          .scale = {blocks.view(is_mx ? at::kFloat8_e8m0fnu : at::kFloat8_e4m3fn)},
                          .scaling = {static_cast<std::int64_t>(
                              is_mx ? ScalingType::BlockWise1x32 : ScalingType::BlockWise1x16)},
                          .swizzle = {static_cast<std::int64_t>(SwizzleType::SWIZZLE_32_4_4)}};
  if (!is_mx) {
    side.scale.push_back(factor);
    side.scaling.push_back(static_cast<std::int64_t>(ScalingType::TensorWise));
    side.swizzle.push_back(static_cast<std::int64_t>(SwizzleType::NO_SWIZZLE));
  }
  return side;
}

}  // namespace

BlockScaledSide block_scaled_side(const Spec& spec, const Tensor& codes, const Tensor& scale,
                                  const Tensor& factor, const Groups& groups) {
  const Tensor bytes = scale.contiguous().view(at::kByte);
  const Tensor blocks = swizzle(spec, scale_of_rows(spec, bytes, codes.sym_size(-2)), groups);
  return side_of_blocks(spec, codes, blocks, factor);
}

BlockScaledSide block_scaled_side(const Spec& spec, const SwizzledCodes& in, const Tensor& factor) {
  const Tensor blocks = in.scale.view(at::kByte).view_symint(
      {in.scale.sym_size(0) * kSwizzleTileRows, in.scale.sym_size(1) * kSwizzleTileCols});
  return side_of_blocks(spec, in.codes, blocks, factor);
}

namespace block_scaled {

// Whether the GPU's tensor cores read the block scales, and torch 2.11 lets them (ScaledBlas.cpp):
// NVFP4 by NVFP4, MXFP8 by MXFP8 in E4M3 (check_mxfp8_recipe), and MXFP4 by MXFP4 on compute
// capability 10 alone (line 1092). No tensor core reads E1M2. Any rounding, transform and block
// height.
bool supports(const Product& product, int capability) {
  const bool is_datacenter = capability == kBlackwell || capability == kBlackwellUltra;
  if (!is_datacenter && capability != kRtxBlackwell && capability != kDgxSpark) return false;
  const Spec &a = product.a, &b = product.b;
  if (a.rule != b.rule || a.elements != b.elements) return false;
  if (a.elements == Elements::kE2m1 && a.rule == ScaleRule::kNvfp4) return true;
  return a.rule == ScaleRule::kMx &&
         (a.elements == Elements::kE4m3 || (a.elements == Elements::kE2m1 && is_datacenter));
}

// Whether k is a multiple of 32: whole blocks, and whole 16 bytes of E2M1. ATen's product of MXFP4
// writes only bf16, and drops a bias.
bool takes(const Product& product, int, const ProductShape& shape) {
  const bool is_mxfp4 = product.a.rule == ScaleRule::kMx && product.a.elements == Elements::kE2m1;
  const bool writes =
      !is_mxfp4 || (shape.out_dtype == c10::ScalarType::BFloat16 && !shape.has_bias);
  return takes_codes(shape) && shape.k % 32 == 0 && writes && !shape.has_fp4_as_fp8;
}

BlockScaledSide side_of(const Spec& spec, const ProductInput& input) {
  const InputTensors in = tensors_of(input);
  Tensor factor;
  if (spec.has_tensor_amax()) factor = tensor_factor_of(spec, *in.scale, *in.amax);
  if (const auto* swizzled = std::get_if<SwizzledCodes>(&input))
    return block_scaled_side(spec, *swizzled, factor);
  return block_scaled_side(spec, *in.elements, *in.scale, factor);
}

Tensor multiply(const ProductCall& call) {
  const BlockScaledSide a = side_of(call.product.a, call.a), b = side_of(call.product.b, call.b);
  const auto [bias, dtype, is_whole] = request_of(call.result, true);
  const Tensor out = at::_scaled_mm_v2(a.codes, direct_transpose(b.codes), a.scale, a.scaling,
                                       a.swizzle, b.scale, b.scaling, b.swizzle, bias, dtype);
  return is_whole ? out : add_bias(out, call.result);
}

}  // namespace block_scaled

constinit const Engine kBlockScaled = {.name = "block_scaled",
                                       .does = "a GEMM of codes under block scales",
                                       .supports = block_scaled::supports,
                                       .takes = block_scaled::takes,
                                       .reads_swizzled = true,
                                       .multiply = block_scaled::multiply};

}  // namespace torch_ops

namespace {

using at::Tensor;
using torch_ops::is_scale_dtype;
using Parts =
    std::tuple<Tensor, std::vector<Tensor>, std::vector<std::int64_t>, std::vector<std::int64_t>>;

const Spec& check_operand(const Tensor& codes, const Tensor& scale, const Tensor& amax,
                          const std::string& text, const c10::SymInt& cols) {
  const Spec& spec = bridge::parse_spec(text);
  TORCH_CHECK_VALUE((spec.rule == ScaleRule::kMx || spec.rule == ScaleRule::kNvfp4) &&
                        spec.elements != Elements::kE1m2,
                    "block_scaled_operand: expected an MX or NVFP4 spec, got ", spec.str());
  constexpr const char* kOp = "block_scaled_operand";
  bridge::check_size(kOp, "cols", cols);
  bridge::check_sizes(kOp, "codes", codes);
  TORCH_CHECK_VALUE(codes.dim() == 2 && codes.scalar_type() == at::kByte &&
                        codes.sym_size(1) == spec.code_cols(cols),
                    "block_scaled_operand: expected uint8 codes (rows, ", spec.code_cols(cols),
                    ") for ", cols, " columns under ", spec.str(), ", got ", codes.scalar_type(),
                    " ", codes.sym_sizes());
  const torch_ops::AsRead<c10::SymInt> read = {
      .batch = {}, .groups = {}, .rows = codes.sym_size(0), .cols = cols, .columnwise = false};
  const auto row_major = read.scale(spec), swizzled = read.swizzled(spec);
  TORCH_CHECK_VALUE(is_scale_dtype(scale.scalar_type(), spec) &&
                        (scale.sym_sizes().equals(c10::SymIntArrayRef(row_major)) ||
                         scale.sym_sizes().equals(c10::SymIntArrayRef(swizzled))),
                    "block_scaled_operand: expected one-byte scales ",
                    c10::SymIntArrayRef(row_major), ", or swizzled ones ",
                    c10::SymIntArrayRef(swizzled), ", under ", spec.str(), ", got ",
                    scale.scalar_type(), " ", scale.sym_sizes());
  torch_ops::check_tensor_factor(kOp, "the operand", spec, scale, amax);
  bridge::check_same_device(kOp, "scale", scale, codes);
  bridge::check_same_device(kOp, "amax", amax, codes);
  return spec;
}

Parts as_parts(torch_ops::BlockScaledSide side) {
  return {side.codes.clone(), std::move(side.scale), std::move(side.scaling),
          std::move(side.swizzle)};
}

Parts block_scaled_operand_kernel(const Tensor& codes, const Tensor& scale, const Tensor& amax,
                                  const std::string& text, c10::SymInt cols) {
  const Spec& spec = check_operand(codes, scale, amax, text, cols);
  const bool is_meta = codes.is_meta();
  Tensor factor;
  if (is_meta) factor = at::empty({}, amax.options().dtype(at::kFloat));
  for (const Tensor* t : {&codes, &scale, &amax})
    if (!is_meta) bridge::check_memory("block_scaled_operand", "codes, scale and amax", *t);
  const at::AutoDispatchBelowADInplaceOrView below;
  if (!is_meta && spec.has_tensor_amax()) factor = torch_ops::tensor_factor_of(spec, scale, amax);
  if (scale.dim() == 3) {
    const Tensor own = scale.clone(at::MemoryFormat::Contiguous);  // no result is an argument
    return as_parts(torch_ops::block_scaled_side(spec, {codes, own, amax}, factor));
  }
  return as_parts(torch_ops::block_scaled_side(spec, codes, scale, factor));
}

}  // namespace

const torch_ops::Op block_scaled_operand_op("block_scaled_operand", block_scaled_operand_kernel,
                                            torch_ops::skipped());

}  // namespace minifloat
