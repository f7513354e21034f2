#include "layers/double_backward.h"

#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>

namespace minifloat::torch_ops {

using at::Tensor;

namespace {

// Autograd's pointer to a node: std::shared_ptr, and in newer versions of torch an intrusive one.
using NodePointer = decltype(torch::autograd::Edge::function);

template <typename Pointer, typename Node, typename... Args>
Pointer new_node(Args&&... args) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>)
    return std::make_shared<Node>(std::forward<Args>(args)...);
  else
    return c10::make_intrusive<Node>(std::forward<Args>(args)...);
}

}  // namespace

torch::autograd::variable_list refuse_double_backward(const std::string& op,
                                                      const std::string& recipe,
                                                      const torch::autograd::Node& node,
                                                      const torch::autograd::variable_list& grads,
                                                      torch::autograd::variable_list gradients) {
  torch::autograd::edge_list inputs = node.next_edges();
  for (const Tensor& g : grads)
    if (g.defined() && g.requires_grad()) inputs.push_back(torch::autograd::impl::gradient_edge(g));
  const auto error = new_node<NodePointer, torch::autograd::Error>(
      op + ": expected no second derivative through a quantized product (recipe " + recipe +
          "), got one: the backward pass of minifloat's layers is not differentiable. Leave the "
          "layers that a double backward passes through in high precision, by filter_fqns or a "
          "recipe map",
      std::move(inputs));
  for (Tensor& gradient : gradients) {
    if (!gradient.defined()) continue;
    gradient = gradient.detach();
    torch::autograd::set_history(gradient, error);
  }
  return gradients;
}

}  // namespace minifloat::torch_ops
