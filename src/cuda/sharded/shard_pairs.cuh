// Two directions of one weight that are cast from the same shard of its master: it is read once for both. Or one alone,
// whose cells are one column wide.
#pragma once

#include "cuda/common/batch.cuh"
#include "cuda/sharded/shard.cuh"

namespace minifloat::cuda {

struct alignas(16) ShardPair {
  ShardEntry of[2];  // the same master, shard and sizes; neither is delayed
  int count;
};

// The amaxes of each, tiles as add_shard (partial_cast.cu) counts them.
void amax_of_pairs(const Table<ShardPair>& pairs, const Execution& execution);

// The codes of each, whose elements are `first` and `second`; bf16: there is no second.
void cast_pairs(Elements first, Elements second, const Table<ShardPair>& pairs,
                const Execution& execution);

}  // namespace minifloat::cuda
