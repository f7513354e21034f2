// Sums of weight gradients over micro-batches, in fp32. `accumulate` of the layers' ops says where
// backward adds a weight's gradient:
//
//     ""             nowhere: autograd receives the gradient in the weight's dtype
//     "grad"         to .grad of a leaf without hooks, where autograd would add the gradient and
//                    .grad is fp32 already; else autograd receives the gradient, in fp32
//     "main_grad"    to the op's main_grad; autograd receives what `received` says: "" nothing,
//                    "empty" uninitialized memory, "zeros" zeros, for frameworks whose hooks run
//                    only when the weight gets a gradient
//
// Nothing is added under torch.autograd.grad. If its caller requests the weight's gradient,
// autograd receives that gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <mutex>
#include <string>

namespace minifloat::torch_ops {

using at::Tensor;

// `accumulate` and `received`, checked.
struct Accumulation {
  bool into_grad = false;
  bool into_main_grad = false;
  std::string received = "";  // with main_grad: "", "empty" or "zeros"

  bool is_on() const { return into_grad || into_main_grad; }
};

// Raises ValueError for other texts, for `received` without main_grad, and for a main_grad that
// `accumulate` does not ask for or lacks.
Accumulation accumulation(const char* op, const std::string& accumulate,
                          const std::string& received, bool has_main_grad);

// Raises ValueError for a main_grad that is not fp32 of the weight's shape and device, or that
// autograd tracks.
void check_main_grad(const char* op, const Tensor& main_grad, const Tensor& weight);

// A sum of gradients, which no other backward thread changes while this object lives. Autograd
// locks the same mutex where it adds to .grad.
struct WeightSum {
  Tensor tensor;  // undefined: autograd receives the gradient instead
  std::unique_lock<std::mutex> lock = {};
};

// Returns the sum to which the running backward node adds the gradient of its input `edge`. Raises
// ValueError for a weight with hooks that would receive no gradient, and for a sum whose memory is
// freed.   main_grad: this weight's; or undefined
WeightSum sum_of_weight(const Accumulation& accumulation, const Tensor& main_grad,
                        std::size_t edge);

// Returns the tensor that autograd receives for a weight whose gradient was added to `sum`.
Tensor received_for(const Accumulation& accumulation, const Tensor& sum, at::ScalarType dtype);

}  // namespace minifloat::torch_ops
