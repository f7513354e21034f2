#include "layers/read_again.h"

#include <c10/core/ScalarType.h>

#include "ops/bridge.h"

namespace minifloat::torch_ops {
namespace {

constexpr const char* kRng =
    ": expected rng as forward read it, got a tensor that was modified by an inplace operation "
    "since; backward draws from it too";
constexpr const char* kHistory =
    ": expected amax_history as forward read it, got a tensor that was modified by an inplace "
    "operation since; backward scales by it too. Call mf.step after the backward passes of all "
    "forwards";
constexpr const char* kWeightOperands =
    ": expected weight_operands as forward read them, got a tensor that was modified by an inplace "
    "operation since; backward reads them too";

// Of the tensors of torch.func.vmap, and of those of is_grads_batched.
constexpr c10::DispatchKeySet kBatchedKeys({c10::DispatchKey::FuncTorchBatched,
                                            c10::DispatchKey::Batched});

std::uint32_t version_of(const Tensor& t) { return t.is_inference() ? 0 : t._version(); }

}  // namespace

void ReadAgain::add(at::TensorList tensors, const char* error) {
  for (const Tensor& t : tensors)
    if (t.defined()) reads_.push_back({t, version_of(t), error});
}

void ReadAgain::add_rng(at::TensorList states) { add(states, kRng); }
void ReadAgain::add_histories(at::TensorList histories) { add(histories, kHistory); }
void ReadAgain::add_weight_operands(at::TensorList operands) { add(operands, kWeightOperands); }

std::vector<Tensor> ReadAgain::saved_tensors(const char* op,
                                             torch::autograd::AutogradContext& context,
                                             const std::vector<Tensor>& grads) const {
  for (const Tensor& g : grads)
    TORCH_CHECK_NOT_IMPLEMENTED(
        !g.defined() || !g.key_set().has_any(kBatchedKeys), op,
        ": expected the gradients of one backward pass, got a batch of them, as is_grads_batched, "
        "jacobian(vectorize=True) and vmap pass. Call torch.autograd.grad for each, or use "
        "torch.func.vjp, jacrev and vmap of the function itself");
  // May run a checkpointed forward pass again, which records its own graph.
  std::vector<Tensor> saved = context.get_saved_variables();
  for (const Read& read : reads_)
    TORCH_CHECK(version_of(read.tensor) == read.version, op, read.error);
  for (const Tensor& t : saved)
    if (t.defined() && t.scalar_type() == at::kInt)
      bridge::check_memory_if_real(op, "saved indices", t);
  return saved;
}

void refuse_compiled_autograd(const char* op) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op,
      ": expected a compiled forward under compiled autograd, got an eager one, whose backward "
      "pass "
      "cannot be traced. Compile the model or its blocks too, or turn compiled autograd off");
}

}  // namespace minifloat::torch_ops
