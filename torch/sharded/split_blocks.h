// The blocks that cuts split, of weights whose scale rule reads the values of whole blocks: which
// ones they are, and the exchange of their values between ranks.
//
//     shards of all ranks      rank_agreement.h exchanges them once for each list of weights, and
//                              again where a rank's shards change
//     range around each cut    a slot of fp32 masters: each rank copies its elements
//                              | one all-reduce of all slots
//     PartialCast::following   a shard's place in a slot
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "minifloat/partial_cast.h"
#include "sharded/ranks.h"

namespace minifloat::torch_ops {

using Spans = std::vector<Span>;

class SplitBlocks {
 public:
  // Finds the split blocks of a list of casts, which has the same weights on all ranks.
  // shards: of each rank, of each cast
  SplitBlocks(const std::vector<PartialCast>& casts, const std::vector<Spans>& shards);

  // Exchanges the masters of split blocks in one all-reduce, none where no block is split, and
  // points every cast at those that follow its shard. Returns their memory.
  at::Tensor exchange_values(const Ranks& ranks, std::vector<PartialCast>& casts,
                             const at::Tensor& like) const;

 private:
  // A range of flat elements of a cast's weight, from `at` on in the exchanged memory.
  struct Slot {
    std::size_t cast;
    Span elements;
    std::int64_t at;
  };
  void add_slots(std::size_t cast, const WeightBlocks& blocks, std::vector<std::int64_t> cuts);

  std::vector<Slot> slots_;
  std::int64_t size_ = 0;  // of all slots, in elements
};

}  // namespace minifloat::torch_ops
