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

struct LayerCall;
using ArgumentReader = void (*)(LayerCall&, const c10::IValue&);

// Returns the readers of an op's arguments, in the schema's order.
std::vector<ArgumentReader> argument_readers(const c10::FunctionSchema& schema);

// One call. What an op does not take, or the caller leaves out, is empty.
struct LayerCall {
  LayerCall(const std::vector<ArgumentReader>& readers, at::ArrayRef<c10::IValue> arguments);

  Tensor x;
  std::vector<Tensor> weights;
  std::vector<Tensor> biases;                       // of the weights that have one
  std::vector<int> bias_index;                      // of each weight's bias in biases; -1: none
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

// A boxed kernel that runs kRun(const LayerCall&). Each op has a kRun of its own, whose first call
// finds the readers.
template <auto kRun>
void run_layer(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const std::vector<ArgumentReader> readers = argument_readers(op.schema());
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(readers.size() == op.schema().arguments().size());
  auto result = kRun(LayerCall(readers, torch::jit::last(*stack, readers.size())));
  torch::jit::drop(*stack, readers.size());
  torch::jit::push(*stack, std::move(result));
}

}  // namespace minifloat::torch_ops
