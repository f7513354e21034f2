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
                                             torch::autograd::AutogradContext& context) const {
  // May run a checkpointed forward pass again, which records its own graph.
  std::vector<Tensor> saved = context.get_saved_variables();
  for (const Read& read : reads_)
    TORCH_CHECK(version_of(read.tensor) == read.version, op, read.error);
  for (const Tensor& t : saved)
    if (t.defined() && t.scalar_type() == at::kInt)
      bridge::check_memory_if_real(op, "saved indices", t);
  return saved;
}

}  // namespace minifloat::torch_ops
