// Products on CUDA. Every factor stays on the device: nothing waits for it.
//
//     FP8                                cuBLASLt's scaled product of the codes, or ATen's: one kernel
//     block scales, on Blackwell         ATen's block-scaled product of the codes, after their scales are swizzled
//     FP4 under powers of two            the same, of the codes carried in FP8 (products.cpp)
//     exact, no factor owed              ATen's bf16 product: one kernel
//     exact, factors of whole operands   cuBLASLt's with a device factor (cublaslt.h), where this build has it: one kernel
//     exact, else                        fp32 sums, then one pass: times the last factor, plus bias, rounded once
#include <ATen/ATen.h>
#include <ATen/BlasBackend.h>

#include "minifloat/core/block.h"
#include "ops/plain.h"
#include "products/cublaslt.h"
#include "products/products.h"

namespace minifloat::torch_ops {
namespace {

Tensor empty_result(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  return plain_empty(a, {a.size(0), b.size(0)}, dtype);
}

// sums (m, n) fp32 + bias, rounded once.
Tensor add_bias(const Tensor& sums, const Result& result) {
  if (result.dtype == at::kFloat) return sums.add(*result.bias);
  Tensor out = plain_empty(sums, sums.sizes(), result.dtype);
  return at::add_out(out, sums, to_dtype(*result.bias, result.dtype));
}

// What an engine is asked for: a bf16 bias is added before it rounds, where it can; else the sums come in fp32, for
// add_bias.
struct Request {
  std::optional<Tensor> bias;
  at::ScalarType dtype;
  bool is_whole;
};
Request request_of(const Result& result, bool can_add) {
  if (!result.bias) return {std::nullopt, result.dtype, true};
  if (can_add && result.dtype == at::kBFloat16)
    return {to_dtype(*result.bias, at::kBFloat16), result.dtype, true};
  return {std::nullopt, at::kFloat, false};
}

// ---- FP8 -------------------------------------------------------------------------------------

// Both read codes that are contiguous.
Tensor fp8_view(const Fp8Side& side) {
  return plain_view(side.codes,
                    side.spec.elements == Elements::kE4m3 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2,
                    side.codes.sizes());
}
Tensor scale_view(const Fp8Side& side, at::IntArrayRef shape) {
  return plain_view(side.scale.contiguous(), at::kFloat, shape);
}

// Contiguous (cols, rows) as (rows, cols), with the strides that cuBLAS checks where a size is one, too.
Tensor as_columns(const Tensor& t, std::int64_t cols, std::int64_t rows) {
  return plain_view(t, t.scalar_type(), {rows, cols}, {1, rows}, t.storage_offset());
}

// Scales of blocks (outer, L) as cuBLAS reads them. 1x128: (outer, L), outer adjacent, which takes a transpose.
// 128x128: (L4, outer), L adjacent and padded to L4, a multiple of 4: what was given, where L is one.
Tensor block_scale(const Fp8Side& side) {
  const Tensor scale = scale_view(
      side, {side.spec.scale_rows(side.codes.size(0)), side.spec.scale_cols(side.codes.size(1))});
  const std::int64_t outer = scale.size(0), length = scale.size(1);
  if (side.spec.block_rows == 1)
    return as_columns(plain_transpose(scale).contiguous(), length, outer);
  const std::int64_t padded = round_up<std::int64_t>(length, 4);
  const Tensor rows = padded == length ? scale : at::constant_pad_nd(scale, {0, padded - length});
  return as_columns(rows, outer, padded);
}

std::int64_t block_scaling(const Spec& spec) {
  return static_cast<std::int64_t>(spec.block_rows == 1 ? at::blas::ScalingType::BlockWise1x128
                                                        : at::blas::ScalingType::BlockWise128x128);
}

}  // namespace

Tensor fp8_product(Engine engine, const Fp8Side& a, const Fp8Side& b, bool fast,
                   const Result& result) {
  const Tensor left = fp8_view(a), right = fp8_view(b);
  const auto [bias, dtype, is_whole] = request_of(result, engine != Engine::kFp8Block);
  Tensor out;
  if (engine != Engine::kFp8Block) {
    const bool by_row = engine == Engine::kFp8Row;
    const Tensor a_scale = scale_view(a, {by_row ? left.size(0) : 1, 1}),
                 b_scale = scale_view(b, {1, by_row ? right.size(0) : 1});
    const auto product =
        product_of_codes({left, a_scale}, {right, b_scale}, by_row, fast, {bias, dtype});
    out = product ? *product
                  : at::_scaled_mm(left, plain_transpose(right), a_scale, b_scale, bias,
                                   std::nullopt, dtype, fast);
  } else {  // fast accumulation is a permission; blocks accumulate exactly
    const std::int64_t no_swizzle = static_cast<std::int64_t>(at::blas::SwizzleType::NO_SWIZZLE);
    out = at::_scaled_mm_v2(left, plain_transpose(right), {block_scale(a)}, {block_scaling(a.spec)},
                            {no_swizzle}, {block_scale(b)}, {block_scaling(b.spec)}, {no_swizzle},
                            std::nullopt, dtype);
  }
  return is_whole ? out : add_bias(out, result);
}

// ---- Block scales: not yet run on hardware ------------------------------------------------------

Tensor block_scaled_product(const BlockScaledSide& a, const BlockScaledSide& b,
                            const Result& result) {
  const auto [bias, dtype, is_whole] = request_of(result, true);
  const Tensor out = at::_scaled_mm_v2(a.codes, plain_transpose(b.codes), a.scale, a.scaling,
                                       a.swizzle, b.scale, b.scaling, b.swizzle, bias, dtype);
  return is_whole ? out : add_bias(out, result);
}

// ---- Exact -----------------------------------------------------------------------------------

namespace {

// (m, k) · (n, k)ᵀ in fp32 sums, as they are or rounded once.
Tensor multiply(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  if (are_narrow(a, b) && dtype == at::kFloat) return at::mm(a, plain_transpose(b), at::kFloat);
  return at::mm(to_dtype(a, dtype), plain_transpose(to_dtype(b, dtype)));
}

// The factors that the sums (m, n) are still to be multiplied by, broadcastable.
std::vector<Tensor> owed(const ExactSide& a, const ExactSide& b) {
  std::vector<Tensor> factors;
  if (a.factor.defined() && b.factor.defined())
    factors.push_back(a.factor * b.factor);
  else if (a.factor.defined() || b.factor.defined())
    factors.push_back(a.factor.defined() ? a.factor : b.factor);
  if (a.row_factors.defined()) factors.push_back(a.row_factors.unsqueeze(1));
  if (b.row_factors.defined()) factors.push_back(b.row_factors.unsqueeze(0));
  return factors;
}

Tensor product_of_sums(const ExactSide& a, const ExactSide& b, const Result& result) {
  std::vector<Tensor> factors = owed(a, b);
  const Tensor last = factors.back();
  factors.pop_back();
  Tensor sums = multiply(a.values, b.values, at::kFloat);
  for (const Tensor& factor : factors) sums.mul_(factor);
  Tensor out = result.dtype == at::kFloat ? sums : empty_result(a.values, b.values, result.dtype);
  return result.bias ? at::addcmul_out(out, *result.bias, sums, last)
                     : at::mul_out(out, sums, last);
}

}  // namespace

Tensor exact_product_cuda(const ExactSide& a, const ExactSide& b, const Result& given) {
  const auto bias = given.bias ? std::optional(to_dtype(*given.bias, given.dtype)) : std::nullopt;
  const bool narrow = are_narrow(a.values, b.values), rounds = given.dtype == at::kBFloat16;
  if (rounds && !narrow)  // an fp32 operand is multiplied as it is, in fp32
    return to_dtype(exact_product_cuda(a, b, {bias, at::kFloat}), given.dtype);
  const Result result = {bias, given.dtype};

  if (a.values.numel() == 0 || b.values.numel() == 0) {
    const Tensor zeros = empty_result(a.values, b.values, result.dtype).zero_();
    return bias ? zeros + *bias : zeros;
  }
  const bool owes_rows = a.row_factors.defined() || b.row_factors.defined();
  if (!owes_rows && !a.factor.defined() && !b.factor.defined()) {
    if (!bias) return multiply(a.values, b.values, result.dtype);
    if (rounds) return at::addmm(*bias, a.values, plain_transpose(b.values));
    return add_bias(multiply(a.values, b.values, at::kFloat), result);
  }
  if (!owes_rows && narrow)
    if (auto product = product_by_device_factor(a, b, result)) return *product;
  return product_of_sums(a, b, result);
}

}  // namespace minifloat::torch_ops
