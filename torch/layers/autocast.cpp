// The layers' ops under autocast: values are cast to its dtype, and gradients pass the cast back.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <string>
#include <string_view>
#include <vector>

#include "layers/layer_call.h"
#include "layers/sharding.h"
#include "ops/bridge.h"
#include "ops/checks.h"

namespace minifloat {
namespace {

using at::Tensor;

template <c10::DeviceType device>
Tensor cast(const Tensor& t) {
  return at::autocast::cached_cast(torch_ops::autocast_dtype(device), t, device);
}

template <c10::DeviceType device>
c10::DispatchKey autocast_key() {
  return at::autocast::get_autocast_dispatch_key_from_device_type(device);
}

// Casts the weights of a call. Clears `recompute` where backward cannot quantize them again.
template <c10::DeviceType device>
struct WeightsBelow {
  bool has_codes;          // whether the caller passes the weights' codes
  c10::IValue* recompute;  // null: the op has no such argument

  // Returns the weight that the layer reads. One whose codes the caller passes is not read, so it
  // is not cast, except a tensor subclass: the cast of a QuantizedTensor costs nothing, and its
  // dtype is that of the gradient. A rounded copy of the weight has more bytes than codes, which
  // are saved for backward instead. A trace keeps no copy: compiled code computes it again.
  Tensor of(const Tensor& weight) const {
    const bool is_subclass = weight.key_set().has(c10::DispatchKey::Python);
    const Tensor below = has_codes && !is_subclass ? weight : cast<device>(weight);
    if (recompute && !below.is_same(weight) && bridge::is_real(weight)) *recompute = std::string();
    return below;
  }
};

// Replaces the number of a weight's cache by the codes, which depend on autocast.
void read_weight_cache(const c10::OperatorHandle& op, c10::IValue* values, c10::IValue* cache,
                       c10::IValue* operands) {
  const at::ArrayRef<c10::IValue> all(values, op.schema().arguments().size());
  std::vector<Tensor> codes = torch_ops::cached_codes(torch_ops::LayerCall(op.schema(), all));
  *cache = 0;
  if (!codes.empty()) *operands = std::move(codes);
}

// Runs a layer's op below autocast, with its arguments by their names:
//
//     x, A, bias, biases     are cast
//     weight, B, weights     are cast where the layer reads them
template <c10::DeviceType device>
void run_below(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  c10::IValue* const values = stack->data() + (stack->size() - arguments.size());
  const auto argument = [&](std::string_view name) -> c10::IValue* {
    for (std::size_t i = 0; i < arguments.size(); ++i)
      if (arguments[i].name() == name) return values + i;
    return nullptr;
  };
  const auto find = [&](std::string_view name) -> c10::IValue* {
    c10::IValue* const value = argument(name);
    return value && !value->isNone() ? value : nullptr;
  };
  c10::IValue* const cache = argument("weight_cache");
  if (cache && cache->toInt() != 0)
    read_weight_cache(op, values, cache, argument("weight_operands"));
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key<device>());
  const torch_ops::BelowAutocast below_autocast;
  for (const char* name : {"x", "A", "bias"})
    if (c10::IValue* value = find(name)) *value = cast<device>(value->toTensor());
  if (c10::IValue* biases = find("biases")) {
    c10::List<std::optional<Tensor>> below;
    for (const std::optional<Tensor>& bias : biases->toOptionalTensorVector())
      below.push_back(bias ? std::optional(cast<device>(*bias)) : std::nullopt);
    *biases = std::move(below);
  }
  const c10::IValue* accumulate = find("accumulate");
  // A layer that accumulates rounds its weights itself: a cast would round the gradient.
  if (!accumulate || accumulate->toStringRef().empty()) {
    const WeightsBelow<device> below{find("weight_operands") != nullptr, find("recompute")};
    for (const char* name : {"weight", "B"})
      if (c10::IValue* weight = find(name)) *weight = below.of(weight->toTensor());
    if (c10::IValue* weights = find("weights")) {
      std::vector<Tensor> list = weights->toTensorVector();
      for (Tensor& weight : list) weight = below.of(weight);
      *weights = std::move(list);
    }
  }
  op.callBoxed(stack);
}

template <c10::DeviceType device>
void register_kernels(torch::Library& m) {
  torch_ops::register_gathered_input();
  for (const char* op :
       {"linear", "linear_sharded", "linear_group", "mlp", "layer_operands", "scaled_grouped_mm"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&run_below<device>>());
}

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, AutocastCPU, m) { register_kernels<c10::DeviceType::CPU>(m); }
TORCH_LIBRARY_IMPL(minifloat, AutocastCUDA, m) { register_kernels<c10::DeviceType::CUDA>(m); }

}  // namespace minifloat
