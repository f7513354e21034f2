// The layers' ops under autocast: values are cast to its dtype, and gradients pass the cast back.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "layers/sharding.h"
#include "ops/bridge.h"
#include "ops/checks.h"
#include "ops/ops.h"

namespace minifloat {
namespace {

using at::Tensor;

template <c10::DeviceType device>
Tensor cast(const Tensor& t) {
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  TORCH_CHECK_VALUE(bridge::is_value_dtype(dtype), "torch.autocast: expected torch.bfloat16 or ",
                    "torch.float32 around layers under a recipe, got torch.",
                    c10::getDtypeNames(dtype).first, "; write torch.autocast(\"",
                    c10::DeviceTypeName(device, true), "\", torch.bfloat16)");
  return at::autocast::cached_cast(dtype, t, device);
}

template <c10::DeviceType device>
std::optional<Tensor> cast(const std::optional<Tensor>& t) {
  return t ? std::optional(cast<device>(*t)) : std::nullopt;
}

template <c10::DeviceType device>
c10::DispatchKey autocast_key() {
  return at::autocast::get_autocast_dispatch_key_from_device_type(device);
}

// Casts a weight that the layer reads. A weight whose codes the caller passes is not read, so it is
// not cast, except a tensor subclass: the cast of a QuantizedTensor costs nothing, and its dtype is
// that of the gradient.
template <c10::DeviceType device>
Tensor weight_below(const Tensor& weight, const std::optional<at::TensorList>& weight_operands) {
  const bool is_subclass = weight.key_set().has(c10::DispatchKey::Python);
  return weight_operands && !is_subclass ? weight : cast<device>(weight);
}

// Returns `recompute` where backward can quantize the weight itself again. A rounded copy of the
// weight has more bytes than codes, which are saved instead. A trace keeps no copy: compiled code
// computes it again.
const std::string& recompute_of(const std::string& recompute, const Tensor& weight,
                                const Tensor& below) {
  static const std::string kSavesCodes;
  return below.is_same(weight) || !bridge::is_real(weight) ? recompute : kSavesCodes;
}

template <c10::DeviceType device>
Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
              const std::string& recipe, const std::optional<Tensor>& rng,
              const std::optional<Tensor>& amax_history, std::int64_t stream,
              const std::optional<at::TensorList>& x_operands,
              const std::optional<at::TensorList>& weight_operands, const std::string& recompute,
              const std::optional<Tensor>& main_grad, const std::string& accumulate,
              const std::string& received) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key<device>());
  // A cast would round the gradient. The layer rounds the values itself.
  const Tensor below = accumulate.empty() ? weight_below<device>(weight, weight_operands) : weight;
  return torch_ops::linear(cast<device>(x), below, cast<device>(bias), recipe, rng, amax_history,
                           stream, x_operands, weight_operands,
                           recompute_of(recompute, weight, below), main_grad, accumulate, received);
}

template <c10::DeviceType device>
std::vector<Tensor> layer_operands(const Tensor& x, const std::string& recipe,
                                   const std::string& of, bool rowwise, bool columnwise,
                                   const std::optional<Tensor>& amax_history,
                                   const std::string& group, std::int64_t rank, std::int64_t ranks,
                                   std::int64_t weight_dim, std::optional<std::int64_t> token_dim,
                                   const std::optional<Tensor>& groups,
                                   const std::optional<Tensor>& rows_from) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key<device>());
  return torch_ops::layer_operands(cast<device>(x), recipe, of, rowwise, columnwise, amax_history,
                                   group, rank, ranks, weight_dim, token_dim, groups, rows_from);
}

template <c10::DeviceType device>
Tensor scaled_grouped_mm(const Tensor& a, const Tensor& b, const Tensor& offs,
                         const std::string& recipe, at::ScalarType out_dtype,
                         const std::optional<Tensor>& bias, const std::optional<Tensor>& rng,
                         const std::optional<Tensor>& row_ids, std::int64_t first_expert,
                         const std::optional<Tensor>& amax_history, const std::string& tail,
                         std::int64_t stream, const std::optional<at::TensorList>& a_operands,
                         const std::optional<at::TensorList>& weight_operands,
                         const std::string& recompute) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key<device>());
  const Tensor below = weight_below<device>(b, weight_operands);
  return torch_ops::scaled_grouped_mm(cast<device>(a), below, offs, recipe, out_dtype,
                                      cast<device>(bias), rng, row_ids, first_expert, amax_history,
                                      tail, stream, a_operands, weight_operands,
                                      recompute_of(recompute, b, below));
}

template <c10::DeviceType device>
Tensor linear_sharded(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                      const std::string& recipe, const std::string& group, std::int64_t rank,
                      std::int64_t ranks, std::int64_t weight_dim,
                      std::optional<std::int64_t> token_dim, const std::optional<Tensor>& rng,
                      const std::optional<Tensor>& amax_history, std::int64_t stream,
                      const std::optional<at::TensorList>& x_operands,
                      const std::optional<at::TensorList>& weight_operands,
                      const std::optional<c10::intrusive_ptr<torch_ops::GatheredInput>>& gathered,
                      const std::string& recompute) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key<device>());
  const Tensor below = weight_below<device>(weight, weight_operands);
  return torch_ops::linear_sharded(cast<device>(x), below, cast<device>(bias), recipe, group, rank,
                                   ranks, weight_dim, token_dim, rng, amax_history, stream,
                                   x_operands, weight_operands, gathered,
                                   recompute_of(recompute, weight, below));
}

template <c10::DeviceType device>
std::vector<Tensor> linear_group(const Tensor& x, at::TensorList weights,
                                 const c10::List<std::optional<Tensor>>& biases,
                                 const std::string& recipe,
                                 const std::optional<at::TensorList>& rng,
                                 const std::optional<at::TensorList>& amax_history) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key<device>());
  std::vector<Tensor> cast_weights;
  c10::List<std::optional<Tensor>> cast_biases;
  for (const Tensor& w : weights) cast_weights.push_back(cast<device>(w));
  for (const std::optional<Tensor> b : biases) cast_biases.push_back(cast<device>(b));
  return torch_ops::linear_group(cast<device>(x), cast_weights, cast_biases, recipe, rng,
                                 amax_history);
}

template <c10::DeviceType device>
Tensor mlp(const Tensor& x, at::TensorList weights, const c10::List<std::optional<Tensor>>& biases,
           const std::string& recipe, const std::string& activation,
           const std::optional<at::TensorList>& rng,
           const std::optional<at::TensorList>& amax_history,
           const std::optional<at::IntArrayRef>& streams,
           const std::optional<at::TensorList>& x_operands,
           const std::optional<at::TensorList>& weight_operands, const std::string& recompute,
           const std::optional<at::TensorList>& main_grads, const std::string& accumulate,
           const std::string& received) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key<device>());
  std::vector<Tensor> cast_weights;
  c10::List<std::optional<Tensor>> cast_biases;
  std::string again = recompute;
  for (const Tensor& w : weights) {
    cast_weights.push_back(accumulate.empty() ? weight_below<device>(w, weight_operands) : w);
    again = recompute_of(again, w, cast_weights.back());
  }
  for (const std::optional<Tensor> b : biases) cast_biases.push_back(cast<device>(b));
  return torch_ops::mlp(cast<device>(x), cast_weights, cast_biases, recipe, activation, rng,
                        amax_history, streams, x_operands, weight_operands, again, main_grads,
                        accumulate, received);
}

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, AutocastCPU, m) {
  torch_ops::register_gathered_input();
  m.impl("linear", linear<c10::DeviceType::CPU>);
  m.impl("layer_operands", layer_operands<c10::DeviceType::CPU>);
  m.impl("linear_group", linear_group<c10::DeviceType::CPU>);
  m.impl("mlp", mlp<c10::DeviceType::CPU>);
  m.impl("scaled_grouped_mm", scaled_grouped_mm<c10::DeviceType::CPU>);
  m.impl("linear_sharded", linear_sharded<c10::DeviceType::CPU>);
}
TORCH_LIBRARY_IMPL(minifloat, AutocastCUDA, m) {
  torch_ops::register_gathered_input();
  m.impl("linear", linear<c10::DeviceType::CUDA>);
  m.impl("layer_operands", layer_operands<c10::DeviceType::CUDA>);
  m.impl("linear_group", linear_group<c10::DeviceType::CUDA>);
  m.impl("mlp", mlp<c10::DeviceType::CUDA>);
  m.impl("scaled_grouped_mm", scaled_grouped_mm<c10::DeviceType::CUDA>);
  m.impl("linear_sharded", linear_sharded<c10::DeviceType::CUDA>);
}

}  // namespace minifloat
