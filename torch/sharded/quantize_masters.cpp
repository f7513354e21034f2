#include "sharded/quantize_masters.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "ops/bridge.h"
#include "sharded/shard_cast.h"

namespace minifloat::torch_ops {
namespace {

using at::Tensor;

// Chooses the scales of all ranks' blocks in the reduced amaxes.
void choose_scales_of_ranks(const Ranks& ranks, std::vector<PartialCast>& casts,
                            const SplitBlocks& split_blocks, const Tensor& packed) {
  const Tensor values = split_blocks.exchange_values(ranks, casts, packed);
  bridge::with_value_errors(
      [&] { choose_scales(casts, bridge::backend_of(packed), bridge::ExecutionOn(packed)); });
  all_reduce(ranks, packed, c10d::ReduceOp::MAX, "choices of scales");
  for (PartialCast& cast : casts) cast.has_chosen_scales = true;
}

}  // namespace

void quantize_masters(std::vector<PartialCast>& casts, const std::vector<std::string>& names,
                      const std::string& group, Agreement& agreement, const Tensor& like) {
  const Ranks ranks = group.empty() ? Ranks() : c10d::resolve_process_group(group);
  if (casts.empty()) {
    if (ranks) require_no_weights(ranks);
    return;
  }
  const bool chooses = ranks && any_reads_values(casts);
  const SplitBlocks* split_blocks = ranks ? &agreement.require(ranks, casts, names, like) : nullptr;
  const Tensor packed = measure_amaxes(casts, like);
  if (ranks) all_reduce(ranks, packed, c10d::ReduceOp::MAX, "amaxes");
  if (chooses) choose_scales_of_ranks(ranks, casts, *split_blocks, packed);
  bridge::with_value_errors(
      [&] { partial_cast(casts, bridge::backend_of(packed), bridge::ExecutionOn(packed)); });
}

}  // namespace minifloat::torch_ops
