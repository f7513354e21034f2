// Two directions of one weight that are cast from the same shard of its master: it is read once for both.
#pragma once

#include "many.cuh"
#include "shard.cuh"

namespace minifloat::cuda {

struct alignas(16) ShardPair {
  ShardEntry of[2];  // the same master, shard and sizes; neither is delayed
};

// The amaxes of both, tiles as add_shard (partial_cast.cu) counts them.
void amax_of_pairs(const Table<ShardPair>& pairs, const Execution& execution);

// The codes of both, of whose elements are `first` and `second`.
void cast_pairs(Elements first, Elements second, const Table<ShardPair>& pairs,
                const Execution& execution);

}  // namespace minifloat::cuda
