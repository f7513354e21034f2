// The gradients of a normalisation, with h the values before weight and bias, x̂ = (x - m) · r:
//
//     dW = Σ g · h        db = Σ g        over all rows, in fp32
//     dx = r · (gw - mean(gw · x̂) · x̂ - mean(gw))      gw = g · w; the last term of a LayerNorm
//
// Rounding has the derivative 1. Statistics are computed again from x, since the cast of the result
// alone may have run before.
#include <ATen/ATen.h>

#include "ops/direct.h"
#include "ops/norm.h"

namespace minifloat::torch_ops {
namespace {

Tensor as_dtype(const Tensor& t, const Tensor& like) {
  return t.defined() ? to_dtype(t, like.scalar_type()) : t;
}
Tensor sum_of_rows(const Tensor& t) { return t.dim() == 1 ? t : t.flatten(0, -2).sum(0); }

// Returns the gradients as a composition of torch's ops.
NormGradients composed(const Tensor& grad, const Tensor& x, const Tensor& weight,
                       const Tensor& bias, NormKind kind, double eps, const NormNeeds& needs) {
  const bool is_layer = kind == NormKind::kLayer;
  const auto mean = [](const Tensor& t) { return t.mean(-1, /*keepdim=*/true); };
  const Tensor values = x.to(at::kFloat), g = grad.to(at::kFloat);
  const Tensor centred = is_layer ? values - mean(values) : values;
  const Tensor factor = (mean(centred * centred) + eps).rsqrt(), normal = centred * factor;
  NormGradients d;
  if (needs.x) {
    const Tensor weighted = weight.defined() ? g * weight.to(at::kFloat) : g;
    Tensor dx = weighted - normal * mean(weighted * normal);
    if (is_layer) dx = dx - mean(weighted);
    d.x = as_dtype(factor * dx, x);
  }
  if (needs.weight) {
    const Tensor h =
        kind == NormKind::kRmsRounded ? normal.to(x.scalar_type()).to(at::kFloat) : normal;
    d.weight = as_dtype(sum_of_rows(g * h), weight);
  }
  if (needs.bias) d.bias = as_dtype(sum_of_rows(g), bias);
  return d;
}

// Returns whether torch's fused kernels compute the gradients.
bool has_fused_kernel(const Tensor& grad, const Tensor& x, const Tensor& weight, const Tensor& bias,
                      NormKind kind) {
  const auto has_dtype = [&](const Tensor& t) {
    return !t.defined() || t.scalar_type() == x.scalar_type();
  };
  return x.is_cuda() && x.numel() > 0 && kind != NormKind::kRmsRounded && has_dtype(weight) &&
         has_dtype(bias) && has_dtype(grad) && !at::GradMode::is_enabled() &&
         can_skip_dispatcher({&grad, &x, &weight, &bias});
}

}  // namespace

NormGradients norm_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                            const Tensor& bias, NormKind kind, double eps, const NormNeeds& needs) {
  if (!has_fused_kernel(grad, x, weight, bias, kind))
    return composed(grad, x, weight, bias, kind, eps, needs);
  const auto maybe = [](const Tensor& t) { return t.defined() ? std::optional(t) : std::nullopt; };
  const auto [factors, means] = direct_norm_statistics(x, kind, eps);
  const Tensor g = grad.contiguous(), values = x.contiguous();
  const std::int64_t shape[] = {x.size(-1)};
  if (kind == NormKind::kLayer) {
    auto [dx, dw, db] = at::native_layer_norm_backward(
        g, values, shape, means, factors, maybe(weight), maybe(bias),
        {needs.x, needs.weight && weight.defined(), needs.bias && bias.defined()});
    return {dx, dw, db};
  }
  auto [dx, dw] = at::_fused_rms_norm_backward(g, values, shape, factors, maybe(weight),
                                               {needs.x, needs.weight && weight.defined()});
  return {dx, dw, {}};
}

}  // namespace minifloat::torch_ops
