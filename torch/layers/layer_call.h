// The arguments of the ops of dense layers in one form: linear, linear_sharded, linear_group and
// mlp. Their kernels are boxed: an argument is read by its name in the schema. An option of a layer
// is a word in the schema, a member here with its reader in layer_call.cpp, and the code that uses
// it.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "layers/arguments.h"
#include "layers/sharding.h"
#include "layers/weight_codes.h"

namespace minifloat::torch_ops {

// One call. What an op does not take, or the caller leaves out, is empty.
struct LayerCall {
  LayerCall() = default;
  // arguments: in the schema's order
  LayerCall(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments);

  Tensor x;
  std::vector<Tensor> weights;
  std::vector<Tensor> biases;                       // of the weights that have one
  PerLayer<int> bias_index;                         // of each weight's bias in biases; -1: none
  std::string recipe, activation;                   // activation: of mlp
  std::vector<Tensor> rng, histories;               // one a weight
  std::vector<std::int64_t> streams;                // one a weight
  std::vector<Tensor> x_operands, weight_operands;  // eight tensors of x, and of each weight
  std::string recompute;
  std::vector<Tensor> main_grads;  // one a weight
  std::string accumulate, received;
  std::optional<Sharding> sharding;  // of linear_sharded
  c10::intrusive_ptr<GatheredInput> gathered;
  c10::intrusive_ptr<WeightCodes> weight_cache;  // of weight_operands that the caller leaves out
  bool training = false;
};

// Returns the codes that the call's cache has of its one weight, or casts now; empty: the layer is
// to quantize the weight, or the caller passes its operands.
std::vector<Tensor> cached_codes(const LayerCall& call);

// Returns `count` layers of a call from weight `begin` on. They refer to the call's tensors.
Layers layers_of(const char* op, const LayerCall& call, std::size_t begin, std::size_t count);

// A boxed kernel that runs kRun(const LayerCall&).
template <auto kRun>
void run_layer(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::size_t count = op.schema().arguments().size();
  auto result = kRun(LayerCall(op.schema(), torch::jit::last(*stack, count)));
  torch::jit::drop(*stack, count);
  torch::jit::push(*stack, std::move(result));
}

}  // namespace minifloat::torch_ops
