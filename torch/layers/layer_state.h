// The autograd of all layers: one function of torch, whose backward pass computes the gradients
// from a layer's state and the tensors that its forward pass saved. Each layer derives its state
// (linear.cpp, mlp.h, grouped_mm.cpp, grouped_mlp.cpp). Before gradients() runs, every state
// requires what backward reads as forward read it:
//
//     saved tensors      torch raises where one was written to since
//     rng                backward draws from it
//     amax_history       backward scales by its active amaxes. Casts raise the current ones, which
//                        no cast reads, without a new version
//     weight_operands    a caller's codes, where a layer does not save them
//
// A version is torch's count of writes to a tensor. rng and histories are no saved tensors:
// backward writes histories, and the second forward pass of a checkpoint may not replace rng.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "layers/operands.h"

namespace minifloat::torch_ops {

using at::Tensor;

class LayerState : public torch::CustomClassHolder {
 public:
  // op: for errors
  LayerState(const char* op, const PreparedRecipe& recipe) : op_(op), recipe_(recipe) {}

  // Record the versions of defined tensors, in the forward pass.
  void add_rng(at::TensorList states);
  void add_histories(at::TensorList histories);
  void add_weight_operands(at::TensorList operands);

  // Keeps what autograd's hooks on saved tensors, such as save_on_cpu, cannot copy yet: a weight's
  // codes whose memory FSDP2 frees until backward, and their scale and amax, which are written
  // then. The hooks get tensors of the same shapes, without values, by which checkpoints compare
  // both forward passes.
  void keep_freed(std::vector<Tensor>& saved);

  // Returns the gradients of the inputs that differentiate() got, in their order; undefined where
  // there is none. saved, grads: of the forward pass and of its results
  virtual std::vector<Tensor> gradients(const std::vector<Tensor>& saved,
                                        const std::vector<Tensor>& grads) const = 0;

  // Returns the tensors that the forward pass saved, in the backward pass.
  // Raises RuntimeError where a tensor was written to since, ValueError where the memory of saved
  // indices is freed, which casts do not check, and NotImplementedError for a batch of gradients.
  std::vector<Tensor> saved_tensors(torch::autograd::AutogradContext& context,
                                    const std::vector<Tensor>& grads) const;

  const char* op() const { return op_; }
  const PreparedRecipe& recipe() const { return recipe_; }

 private:
  struct Read {
    Tensor tensor;
    std::uint32_t version;
    const char* error;  // where another version is found
  };
  void add(at::TensorList tensors, const char* error);

  const char* op_;
  const PreparedRecipe& recipe_;
  c10::SmallVector<Read, 2> reads_;
  std::vector<std::pair<std::size_t, Tensor>> freed_;  // places in saved
};

// What a forward pass leaves: its results, the tensors that backward reads, and its state.
struct ForwardResult {
  std::vector<Tensor> outputs, saved;
  c10::intrusive_ptr<LayerState> state;
};

// Returns the tensors of all lists, as differentiate() takes them.
c10::SmallVector<Tensor, 8> joined(std::initializer_list<at::TensorList> lists);

// Runs a forward pass below autograd and returns its results, which autograd differentiates in
// `inputs` by the state. Their second derivatives raise.
std::vector<Tensor> differentiate(at::TensorList inputs,
                                  c10::function_ref<ForwardResult()> forward);

}  // namespace minifloat::torch_ops
