#include "layers/weight_sums.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "minifloat/error.h"
#include "ops/bridge.h"

namespace minifloat::torch_ops {
namespace {

using torch::autograd::AccumulateGrad;

// Returns the node that accumulates the gradient of the running node's input `edge`; null: the
// input is no leaf.
AccumulateGrad* leaf_of(std::size_t edge) {
  const auto node = torch::autograd::get_current_node();
  if (!node || edge >= node->num_outputs()) return nullptr;
  return dynamic_cast<AccumulateGrad*>(node->next_edge(edge).function.get());
}

// Returns whether this backward pass needs the gradient of the running node's input `edge`.
bool is_asked_for(std::size_t edge) {
  const auto node = torch::autograd::get_current_node();
  return !node || edge >= node->num_outputs() || node->task_should_compute_output(edge);
}

// Returns whether this backward pass adds to the leaf's .grad. torch.autograd.grad adds to none,
// and no pass adds to a leaf that was frozen after its forward.
bool is_accumulated(AccumulateGrad* leaf) {
  if (!leaf->variable.requires_grad()) return false;
  const auto* const executed = torch::autograd::get_current_graph_task_exec_info();
  if (!executed || executed->empty()) return true;  // .backward() of all leaves
  const auto found = executed->find(leaf);
  return found != executed->end() && found->second.needed_ && !found->second.captures_;
}

bool has_hooks(const AccumulateGrad& leaf) {
  return !torch::autograd::impl::hooks(leaf.variable).empty() || leaf.tensor_post_acc_grad_hooks();
}

// Returns whether hooks wait for the leaf's gradient: the tensor's, or its node's, as those of
// DistributedDataParallel. Python checks hooks that run after the addition (nn/accumulation.py).
bool has_hooks_before(AccumulateGrad& leaf) {
  return !torch::autograd::impl::hooks(leaf.variable).empty() || !leaf.pre_hooks().empty() ||
         !leaf.post_hooks().empty();
}

// The mutex of a node is of its class and of those that inherit from it.
struct MutexOfLeaf : AccumulateGrad {
  static std::mutex& of(AccumulateGrad& leaf) { return leaf.*(&MutexOfLeaf::mutex_); }
};

// Returns the mutex of a leaf's sums, or the one of all weights that are no leaves.
std::mutex& mutex_of(AccumulateGrad* leaf) {
  static std::mutex of_others;
  return leaf ? MutexOfLeaf::of(*leaf) : of_others;
}

// Returns .grad of the leaf where autograd would add to it in place, else an undefined tensor.
Tensor grad_of(const AccumulateGrad& leaf) {
  const Tensor& grad = leaf.variable.grad();
  const bool is_sum = grad.defined() && bridge::is_real(grad) && grad.layout() == at::kStrided &&
                      grad.scalar_type() == at::kFloat && !grad.requires_grad() &&
                      grad.sizes().equals(leaf.variable.sizes()) &&
                      grad.device() == leaf.variable.device();
  return is_sum && !has_hooks(leaf) ? grad : Tensor();
}

}  // namespace

Accumulation accumulation(const char* op, const std::string& accumulate,
                          const std::string& received, bool has_main_grad) {
  const Accumulation out = {.into_grad = accumulate == "grad",
                            .into_main_grad = accumulate == "main_grad",
                            .received = received};
  TORCH_CHECK_VALUE(accumulate.empty() || out.is_on(), op,
                    ": expected accumulate as '', 'grad' or 'main_grad', got '",
                    printable(accumulate), "'");
  TORCH_CHECK_VALUE(received.empty() || received == "empty" || received == "zeros", op,
                    ": expected received as '', 'empty' or 'zeros', got '", printable(received),
                    "'");
  TORCH_CHECK_VALUE(received.empty() || out.into_main_grad, op,
                    ": expected received beside accumulate='main_grad', got '", received,
                    "' under '", accumulate, "'");
  TORCH_CHECK_VALUE(out.into_main_grad == has_main_grad, op, ": expected ",
                    has_main_grad ? "no main_grad" : "main_grad", " under accumulate='", accumulate,
                    "', got ", has_main_grad ? "one" : "none");
  return out;
}

void check_main_grad(const char* op, const Tensor& main_grad, const Tensor& weight) {
  TORCH_CHECK_VALUE(main_grad.layout() == at::kStrided && main_grad.scalar_type() == at::kFloat &&
                        main_grad.sym_sizes().equals(weight.sym_sizes()),
                    op, ": expected main_grad as dense float32 ", weight.sym_sizes(), ", got ",
                    main_grad.layout(), " ", main_grad.scalar_type(), " ", main_grad.sym_sizes());
  TORCH_CHECK_VALUE(main_grad.device() == weight.device(), op, ": expected main_grad on ",
                    weight.device(), ", got ", main_grad.device());
  TORCH_CHECK_VALUE(!main_grad.requires_grad(), op,
                    ": expected main_grad that requires no gradient, got one that does");
  TORCH_CHECK_VALUE(at::has_internal_overlap(main_grad) != at::MemOverlap::Yes, op,
                    ": expected main_grad with memory for each element, got strides ",
                    main_grad.sym_strides());
  bridge::check_memory_if_real(op, "main_grad", main_grad);
  if (!bridge::is_real(main_grad) || !bridge::is_real(weight)) return;
  const at::MemOverlapStatus shared = at::get_overlap_status(main_grad, weight);
  TORCH_CHECK_VALUE(shared != at::MemOverlapStatus::Full && shared != at::MemOverlapStatus::Partial,
                    op, ": expected main_grad with memory of its own, got the weight's");
}

WeightSum sum_of_weight(const Accumulation& accumulation, const Tensor& main_grad,
                        std::size_t edge) {
  if (!accumulation.is_on()) return {};
  // Tracing computes gradients by torch.autograd.grad, of leaves that are not the caller's.
  if (main_grad.defined() && !bridge::is_real(main_grad)) return {main_grad};
  AccumulateGrad* const leaf = leaf_of(edge);
  if (leaf ? !is_accumulated(leaf) : !is_asked_for(edge)) return {};
  std::unique_lock lock(mutex_of(leaf));
  if (accumulation.into_grad) {
    const Tensor grad = leaf && !at::GradMode::is_enabled() ? grad_of(*leaf) : Tensor();
    if (!grad.defined()) return {};
    bridge::check_memory("accumulate", ".grad", grad);
    return {grad, std::move(lock)};
  }
  TORCH_CHECK_VALUE(!leaf || !has_hooks_before(*leaf) || !accumulation.received.empty(),
                    "accumulate: expected no gradient hook on a weight whose gradient is added to "
                    "main_grad, got one, which would receive no gradient. Wrappers that reduce "
                    ".grad register such hooks: convert with accumulate='grad' for them");
  bridge::check_memory("accumulate", "main_grad", main_grad);
  return {main_grad, std::move(lock)};
}

Tensor received_for(const Accumulation& accumulation, const Tensor& sum, at::ScalarType dtype) {
  if (accumulation.received.empty()) return {};
  const auto options = sum.options().dtype(dtype);
  return accumulation.received == "zeros" ? at::zeros_symint(sum.sym_sizes(), options)
                                          : at::empty_symint(sum.sym_sizes(), options);
}

}  // namespace minifloat::torch_ops
