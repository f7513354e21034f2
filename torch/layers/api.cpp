#include "minifloat/torch.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/nn/init.h>

#include <cmath>
#include <string>
#include <unordered_map>

#include "minifloat/core/philox.h"

namespace minifloat {
namespace {

constexpr const char* kForwards = "forwards";

// Calls an op by the names of its arguments. Those not given have the schema's defaults.
at::Tensor call(const char* name, const std::unordered_map<std::string, c10::IValue>& given) {
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  torch::jit::Stack stack;
  for (const c10::Argument& argument : op.schema().arguments()) {
    const auto found = given.find(argument.name());
    stack.push_back(found == given.end() ? *argument.default_value() : found->second);
  }
  op.callBoxed(&stack);
  return stack.front().toTensor();
}

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight,
                  const std::optional<at::Tensor>& bias, const Recipe& recipe,
                  const LinearState& state) {
  return call("minifloat::linear", {{"x", x},
                                    {"weight", weight},
                                    {"bias", bias},
                                    {"recipe", recipe.str()},
                                    {"rng", state.rng},
                                    {"amax_history", state.amax_history}});
}

at::Tensor scaled_grouped_mm(const at::Tensor& a, const at::Tensor& b, const at::Tensor& offs,
                             const Recipe& recipe, const GroupedOptions& options) {
  return call("minifloat::scaled_grouped_mm",
              {{"A", a},
               {"B", b},
               {"offs", offs},
               {"recipe", recipe.str()},
               {"out_dtype", options.out_dtype},
               {"bias", options.bias},
               {"rng", options.rng},
               {"row_ids", options.row_ids},
               {"first_expert", options.first_expert},
               {"amax_history", options.amax_history},
               {"tail", options.zeroes_tail ? "zero" : "undefined"}});
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
  reset();
}

void LinearImpl::reset() {
  weight = register_parameter("weight", at::empty({options_.out_features, options_.in_features}));
  torch::nn::init::kaiming_uniform_(weight, std::sqrt(5.0));
  if (options_.bias) {
    bias = register_parameter("bias", at::empty({options_.out_features}));
    const double bound = 1.0 / std::sqrt(static_cast<double>(options_.in_features));
    torch::nn::init::uniform_(bias, -bound, bound);
  }
}

LinearImpl::LinearImpl(std::int64_t in_features, std::int64_t out_features, const Recipe& recipe)
    : LinearImpl(LinearOptions{in_features, out_features, recipe}) {}

at::Tensor LinearImpl::forward(const at::Tensor& x) {
  LinearState state;
  if (options_.recipe.is_stochastic()) {
    if (is_training()) ++forwards_;
    const auto stream =
        static_cast<std::int64_t>(fnv1a64(options_.name.data(), options_.name.size()));
    // Filled on the device: a copy to a device would wait for the device.
    const at::Tensor rng = at::empty({3}, x.options().dtype(at::kLong));
    const auto seed = static_cast<std::int64_t>(
        mix_seed(static_cast<std::uint64_t>(options_.seed),
                 static_cast<std::uint64_t>(options_.data_parallel_rank)));
    const std::int64_t numbers[] = {seed, forwards_, stream};
    for (int i = 0; i < 3; ++i) rng.select(0, i).fill_(numbers[i]);
    state.rng = rng;
  }
  return linear(x, weight, bias.defined() ? std::optional(bias) : std::nullopt, options_.recipe,
                state);
}

void LinearImpl::save(torch::serialize::OutputArchive& archive) const {
  torch::nn::Module::save(archive);
  archive.write(kForwards, c10::IValue(forwards_));
}

void LinearImpl::load(torch::serialize::InputArchive& archive) {
  torch::nn::Module::load(archive);
  c10::IValue count;  // absent in archives of torch::nn::Linear
  if (archive.try_read(kForwards, count)) forwards_ = count.toInt();
}

}  // namespace nn
}  // namespace minifloat
