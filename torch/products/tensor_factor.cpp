#include "products/tensor_factor.h"

#include <ATen/ATen.h>

#include "minifloat/quantize.h"
#include "ops/bridge.h"
#include "ops/direct.h"

namespace minifloat::torch_ops {

void check_tensor_factor(const char* op, const char* name, const Spec& spec, const Tensor& scale,
                         const Tensor& amax, const c10::SymInt& count) {
  if (!spec.has_tensor_amax()) return;
  const bool is_scale = spec.rule == ScaleRule::kTensor;
  const Tensor& factor = is_scale ? scale : amax;
  TORCH_CHECK_VALUE(
      factor.defined() && factor.scalar_type() == at::kFloat && factor.sym_numel() == count, op,
      ": expected ", count, " float32 ", is_scale ? "scale" : "amax", " for ", name, " under ",
      spec.str(), ", got ", factor.sym_numel(), " of ", factor.scalar_type());
}

Tensor tensor_factor_of(const Spec& spec, const Tensor& scale, const Tensor& amax) {
  const Tensor& number = spec.rule == ScaleRule::kTensor ? scale : amax;
  const bool is_of_rows = spec.has_row_amax();
  const auto shape = number.numel() == 1 && !is_of_rows ? at::IntArrayRef() : number.sizes();
  if (spec.rule == ScaleRule::kTensor) return direct_view(scale.contiguous(), at::kFloat, shape);
  const Tensor contiguous = amax.contiguous(), out = direct_empty(amax, shape, at::kFloat);
  bridge::with_value_errors([&] {
    const Quantized q = {.spec = spec,
                         .amax = contiguous.const_data_ptr<float>(),
                         .batch = is_of_rows ? 1 : amax.numel(),
                         .rows = is_of_rows ? amax.numel() : 0,
                         .device = bridge::backend_of(amax)};
    tensor_factor(q, out.mutable_data_ptr<float>(), bridge::ExecutionOn(amax));
  });
  return out;
}

Tensor product_factor_of(const std::optional<TensorFactor>& a, const std::optional<TensorFactor>& b,
                         const Tensor& like, const Execution& execution) {
  const Tensor out = direct_empty(like, {2}, at::kFloat);
  const auto quantized = [&](const std::optional<TensorFactor>& factor) {
    Quantized q;
    q.device = bridge::backend_of(like);
    if (!factor) return q;
    q.spec = *factor->spec;
    if (q.spec.rule == ScaleRule::kTensor)
      q.scale = factor->scale.const_data_ptr();
    else
      q.amax = factor->amax.const_data_ptr<float>();
    return q;
  };
  bridge::with_value_errors([&] {
    product_factor(quantized(a), quantized(b), out.mutable_data_ptr<float>(), execution);
  });
  return out;
}

}  // namespace minifloat::torch_ops
