// Two directions of one weight, cast from the same shard of its master by one read, or one
// direction whose cells are one column wide.
#pragma once

#include "cuda/common/batch.cuh"
#include "cuda/sharded/shard.cuh"

namespace minifloat::cuda {

struct alignas(16) ShardPair {
  ShardEntry of[2];  // the same master, shard and sizes; neither is delayed
  int count;
};

// Raises the amaxes of each pair, over tiles as add_shard (partial_cast.cu) numbers them.
void amax_of_pairs(const Table<ShardPair>& pairs, const Execution& execution);

// Casts each pair into the elements `first` and `second`; bf16: there is no second.
void cast_pairs(Elements first, Elements second, const Table<ShardPair>& pairs,
                const Execution& execution);

}  // namespace minifloat::cuda
