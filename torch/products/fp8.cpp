#include "products/fp8.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "ops/direct.h"
#include "ops/ops.h"
#include "products/cublaslt.h"
#include "products/epilogue.h"

namespace minifloat::torch_ops {

Tensor fp8_view(const Fp8Side& side) {
  return direct_view(side.codes,
                     side.elements == Elements::kE4m3 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2,
                     side.codes.sizes());
}

Fp4AsFp8 as_fp8(const Spec& spec, const ProductInput& input, const c10::SymInt& cols,
                const Groups& groups) {
  if (const auto* fp8 = std::get_if<Fp4AsFp8>(&input)) return *fp8;
  if (const auto* swizzled = std::get_if<SwizzledCodes>(&input))
    return as_fp8(spec, as_codes(spec, *swizzled, cols), cols, groups);
  const Codes& in = std::get<Codes>(input);
  auto [codes, row_scale] = fp4_as_fp8(in.codes, in.scale, in.amax, spec, cols, groups);
  return {std::move(codes), std::move(row_scale), in.amax};
}

Tensor scale_view(const Fp8Side& side, at::IntArrayRef shape) {
  return direct_view(side.scale.contiguous(), at::kFloat, shape);
}

bool is_safe_for_rows(const at::Device& device) {
  if (compute_capability(device) != kAda) return true;
  const c10::impl::VirtualGuardImpl guard(device.type());
  return guard.getStream(device) == guard.getDefaultStream(device);
}

Tensor fp8_product(const Fp8Side& a, const Fp8Side& b, bool has_row_scales, bool fast,
                   const Result& result) {
  const Tensor left = fp8_view(a), right = fp8_view(b);
  const auto [bias, dtype, is_whole] = request_of(result, true);
  const Tensor a_scale = scale_view(a, {has_row_scales ? left.size(0) : 1, 1}),
               b_scale = scale_view(b, {1, has_row_scales ? right.size(0) : 1});
  const ScaleMode mode = has_row_scales ? ScaleMode::kRows : ScaleMode::kTensor;
  const auto product = product_of_codes({left, a_scale, mode}, {right, b_scale, mode}, fast,
                                        {bias, dtype, result.sum});
  const Tensor out = product ? *product
                             : at::_scaled_mm(left, direct_transpose(right), a_scale, b_scale, bias,
                                              std::nullopt, dtype, fast);
  return is_whole ? out : add_bias(out, result);
}

}  // namespace minifloat::torch_ops
