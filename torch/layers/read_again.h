// What a backward pass reads again, as its forward pass read it. The four autograd functions of
// layers (linear.cpp, mlp.cpp, grouped_mm.cpp, grouped_mlp.cpp) get their saved tensors from here:
//
//     saved tensors      torch raises where one was written to since
//     rng                backward draws from it
//     amax_history       backward scales by its active amaxes. Casts raise the current ones, which
//                        no cast reads, without a new version
//     weight_operands    a caller's codes, where a function does not save them
//
// A version is torch's count of writes to a tensor. rng and histories are no saved tensors:
// backward writes histories, and the second forward pass of a checkpoint may not replace rng.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstdint>
#include <vector>

namespace minifloat::torch_ops {

using at::Tensor;

class ReadAgain {
 public:
  // Record the versions of defined tensors, in the forward pass.
  void add_rng(at::TensorList states);
  void add_histories(at::TensorList histories);
  void add_weight_operands(at::TensorList operands);

  // Returns the tensors that the forward pass saved, in the backward pass.
  // Raises RuntimeError where a tensor was written to since, ValueError where the memory of saved
  // indices is freed, which casts do not check, and NotImplementedError for a batch of gradients.
  //   op: for errors; grads: those that backward gets
  std::vector<Tensor> saved_tensors(const char* op, torch::autograd::AutogradContext& context,
                                    const std::vector<Tensor>& grads) const;

 private:
  struct Read {
    Tensor tensor;
    std::uint32_t version;
    const char* error;  // where another version is found
  };
  void add(at::TensorList tensors, const char* error);

  c10::SmallVector<Read, 2> reads_;
};

// Raises NotImplementedError where compiled autograd traces the backward pass of an eager layer:
// torch cannot make its state, which is no tensor, an input of the compiled code.
[[noreturn]] void refuse_compiled_autograd(const char* op);

}  // namespace minifloat::torch_ops
