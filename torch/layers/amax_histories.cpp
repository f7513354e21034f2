#include "layers/amax_histories.h"

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>

#include <algorithm>

#include "minifloat/amax_history.h"
#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/history.h"

namespace minifloat::torch_ops {
namespace {

// Raises the entries of histories in real memory, in one launch.
void raise_directly(const CurrentAmaxes& current_amaxes) {
  c10::SmallVector<FoundAmax, 4> found;
  for (const auto& [history, first, last, amax] : current_amaxes) {
    float* const current = history.mutable_data_ptr<float>() + kCurrent * history.stride(1);
    const float* const of_cast = amax.const_data_ptr<float>();
    found.push_back({current + first * history.stride(0), of_cast});
    if (last != first) found.push_back({current + last * history.stride(0), of_cast});
  }
  const Tensor& history = current_amaxes.front().history;
  const bridge::ExecutionOn here(history);
  bridge::with_value_errors(
      [&] { raise_amaxes({found.data(), found.size()}, bridge::backend_of(history), here); });
}

}  // namespace

void raise(const CurrentAmaxes& found) {
  const auto is_direct = [](const CurrentAmax& p) {
    return p.history.dim() == 2 && can_skip_dispatcher({&p.history, &p.amax}) &&
           p.amax.scalar_type() == at::kFloat;
  };
  if (!found.empty() && std::all_of(found.begin(), found.end(), is_direct))
    return raise_directly(found);
  const at::AutoDispatchBelowADInplaceOrView below;  // keeps the version; see layer_state.h
  for (const auto& [history, first, last, amax] : found) {
    const Tensor current = history.select(-1, kCurrent);
    Tensor raised =
        first == last ? current.select(0, first) : current.slice(0, first, last + 1, last - first);
    at::maximum_out(raised, raised, amax);
  }
}

}  // namespace minifloat::torch_ops
