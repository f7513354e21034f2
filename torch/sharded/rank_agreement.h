// The check that all ranks which hold shards have the same list of weights.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "minifloat/partial_cast.h"
#include "sharded/ranks.h"
#include "sharded/split_blocks.h"

namespace minifloat::torch_ops {

// The lists of weights that groups of ranks have agreed on. A group that is gone is never
// taken for a later group.
class Agreement : public torch::CustomClassHolder {
 public:
  // Raises ValueError on every rank, with the weight's name, where ranks differ in a weight's name,
  // shape, specs or dtype, where the shards of all ranks are not the whole weight, or where the
  // shards of two ranks share some of their elements: they are equal, or disjoint. Communicates
  // once for each list of weights: at the first step. Where a rank's shards change, every rank
  // begins a new Agreement. Returns the split blocks.
  const SplitBlocks& require(const Ranks& ranks, const std::vector<PartialCast>& casts,
                             const std::vector<std::string>& names, const at::Tensor& like);

 private:
  using Lists = std::unordered_map<std::uint64_t, SplitBlocks>;  // by a hash of each list
  Lists& lists_of(const Ranks& ranks);

  std::vector<std::pair<c10::weak_intrusive_ptr<c10d::ProcessGroup>, Lists>> agreed_;
};

// Agrees with the other ranks that none of them has a weight. Raises ValueError on every rank where
// one has. Exchanges on CUDA where the ranks can, as they do with weights there.
void require_no_weights(const Ranks& ranks);

}  // namespace minifloat::torch_ops
