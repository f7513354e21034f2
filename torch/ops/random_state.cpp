// advance_random_state: a new count of a random state, in place, and a copy for one forward pass.
// autograd_threads: which thread's forward pass a backward pass belongs to.
#include "minifloat/random_state.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/op.h"

namespace minifloat {
namespace {

using at::Tensor;

constexpr const char* kAdvanceRandomState = "advance_random_state";

constexpr int kNoBackwardPass = -1;

Tensor advance_kernel(const Tensor& state, bool in_forward) {
  TORCH_CHECK_VALUE(state.scalar_type() == at::kLong && state.dim() == 1 && state.sym_size(0) == 2,
                    kAdvanceRandomState, ": expected state as int64 (seed, count), got ",
                    state.scalar_type(), " ", state.sym_sizes());
  if (state.is_meta()) return at::empty_like(state);
  TORCH_CHECK(!in_forward || torch::autograd::get_current_graph_task_id() == kNoBackwardPass,
              kAdvanceRandomState,
              ": expected a forward pass, got the recomputation of one by compiled code, which "
              "would draw other random bits; compile the model or its blocks instead of a function "
              "that calls them, or checkpoint within them");
  bridge::check_bytes(kAdvanceRandomState, "state", state,
                      2 * static_cast<std::int64_t>(sizeof(std::int64_t)));
  if (c10::InferenceMode::is_enabled()) return state.clone();
  const bridge::ExecutionOn here(state);
  Tensor copy = torch_ops::direct_empty(state, {2}, at::kLong);
  bridge::with_value_errors([&] {
    advance_random_state(state.mutable_data_ptr<std::int64_t>(),
                         copy.mutable_data_ptr<std::int64_t>(), bridge::backend_of(state), here);
  });
  if (!state.is_inference()) state.unsafeGetTensorImpl()->bump_version();
  return copy;
}

const torch_ops::Op advance_op(kAdvanceRandomState, advance_kernel, torch_ops::skipped());

// Returns the number of this thread, and of the thread that made the node whose backward pass runs
// in this one; 0: none runs. Each thread numbers its nodes by itself.
std::tuple<std::int64_t, std::int64_t> autograd_threads() {
  const std::shared_ptr<torch::autograd::Node> node = torch::autograd::get_current_node();
  return {static_cast<std::int64_t>(at::RecordFunction::currentThreadId()),
          node == nullptr ? 0 : static_cast<std::int64_t>(node->thread_id())};
}

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, CatchAll, m) { m.impl("autograd_threads", autograd_threads); }

}  // namespace minifloat
