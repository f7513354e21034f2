#include "minifloat/torch.h"

#include <torch/nn/init.h>

#include <cmath>

#include "minifloat/core/philox.h"
#include "ops/ops.h"

namespace minifloat {

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias, const Recipe& recipe,
                  const LinearState& state) {
  return torch_ops::linear(x, weight, bias, recipe.str(), state.rng, state.amax_history);
}

at::Tensor scaled_grouped_mm(const at::Tensor& a, const at::Tensor& b, const at::Tensor& offs,
                             const Recipe& recipe, const GroupedOptions& options) {
  return torch_ops::scaled_grouped_mm(
      a, b, offs, recipe.str(), options.out_dtype, options.bias, options.rng, options.row_ids,
      options.first_expert, options.amax_history, options.zeroes_tail ? "zero" : "undefined");
}

namespace nn {

LinearImpl::LinearImpl(LinearOptions options) : options_(std::move(options)) {
  TORCH_CHECK_VALUE(options_.in_features > 0 && options_.out_features > 0,
                    "Linear: expected positive sizes, got ", options_.in_features, " x ",
                    options_.out_features);
  TORCH_CHECK_VALUE(
      !options_.recipe.is_delayed(),
      "Linear: delayed scaling keeps histories between steps; call minifloat::linear with "
      "LinearState::amax_history");
  weight = register_parameter("weight", at::empty({options_.out_features, options_.in_features}));
  torch::nn::init::kaiming_uniform_(weight, std::sqrt(5.0));
  if (options_.bias) {
    bias = register_parameter("bias", at::empty({options_.out_features}));
    const double bound = 1.0 / std::sqrt(static_cast<double>(options_.in_features));
    torch::nn::init::uniform_(bias, -bound, bound);
  }
}

LinearImpl::LinearImpl(std::int64_t in_features, std::int64_t out_features, const Recipe& recipe)
    : LinearImpl(LinearOptions{in_features, out_features, recipe, true, "linear", 0}) {}

at::Tensor LinearImpl::forward(const at::Tensor& x) {
  LinearState state;
  if (options_.recipe.is_stochastic()) {
    if (is_training()) ++forwards_;
    const auto stream =
        static_cast<std::int64_t>(fnv1a64(options_.name.data(), options_.name.size()));
    // Filled on the device: a copy to a device would wait for the device.
    const at::Tensor rng = at::empty({3}, x.options().dtype(at::kLong));
    const std::int64_t numbers[] = {options_.seed, forwards_, stream};
    for (int i = 0; i < 3; ++i) rng.select(0, i).fill_(numbers[i]);
    state.rng = rng;
  }
  return linear(x, weight, bias.defined() ? std::optional(bias) : std::nullopt, options_.recipe,
                state);
}

}  // namespace nn
}  // namespace minifloat
