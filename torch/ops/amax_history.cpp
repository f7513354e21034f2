// roll_amax_histories: one step of delayed scaling's amax histories, in place.
#include "minifloat/amax_history.h"

#include <ATen/ATen.h>

#include <limits>

#include "ops/bridge.h"
#include "ops/op.h"

namespace minifloat {
namespace {

using at::Tensor;
using at::TensorList;

constexpr const char* kRollAmaxHistories = "roll_amax_histories";
constexpr std::int64_t kMostMargin = 126;

DelayedAmax parse_algorithm(const std::string& text) {
  TORCH_CHECK_VALUE(text == "max" || text == "most_recent", kRollAmaxHistories,
                    ": expected algorithm 'max' or 'most_recent', got '", printable(text), "'");
  return text == "max" ? DelayedAmax::kMax : DelayedAmax::kMostRecent;
}

// Requires histories of one shape and one device: float32 (…, 1 + length).
void check_histories(TensorList histories, const std::string& algorithm, std::int64_t margin) {
  parse_algorithm(algorithm);
  TORCH_CHECK_VALUE(0 <= margin && margin <= kMostMargin, kRollAmaxHistories,
                    ": expected a margin of 0 to ", kMostMargin, " powers of two, got ", margin);
  bridge::check_one_device(kRollAmaxHistories, {histories});
  for (const Tensor& history : histories) {
    TORCH_CHECK_VALUE(history.scalar_type() == at::kFloat && history.dim() > 0, kRollAmaxHistories,
                      ": expected histories as float32 (…, 1 + length), got ",
                      history.scalar_type(), " of ", history.dim(), " dimensions");
    TORCH_CHECK_VALUE(history.sym_sizes() == histories[0].sym_sizes() && history.sym_size(-1) >= 2,
                      kRollAmaxHistories,
                      ": expected histories of one shape, with one step or more, got ",
                      history.sym_sizes(), " beside ", histories[0].sym_sizes());
  }
}

void roll_kernel(TensorList histories, const std::string& algorithm, std::int64_t margin) {
  check_histories(histories, algorithm, margin);
  if (histories.empty() || histories[0].is_meta()) return;
  for (const Tensor& history : histories)
    bridge::check_bytes(kRollAmaxHistories, "each history", history,
                        histories[0].numel() * static_cast<std::int64_t>(sizeof(float)));
  const Tensor stacked = at::stack(histories);
  const std::int64_t steps = stacked.size(-1);
  TORCH_CHECK_VALUE(steps <= std::numeric_limits<int>::max(), kRollAmaxHistories,
                    ": expected histories of fewer than 2^31 steps, got ", steps - 1);
  bridge::with_value_errors([&] {
    roll_amax_histories({.rows = stacked.mutable_data_ptr<float>(),
                         .count = stacked.numel() / steps,
                         .length = static_cast<int>(steps - 1),
                         .algorithm = parse_algorithm(algorithm),
                         .margin = static_cast<int>(margin),
                         .device = bridge::backend_of(stacked)},
                        bridge::ExecutionOn(stacked));
  });
  at::_foreach_copy_(histories, stacked.unbind());
}

const torch_ops::Op roll_op(kRollAmaxHistories, roll_kernel, torch_ops::skipped());

}  // namespace

}  // namespace minifloat
