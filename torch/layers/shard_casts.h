// The casts of one rank's shard: their bytes are those that the whole's cast has for the shard.
#pragma once

#include <ATen/core/Tensor.h>

#include "layers/operands.h"

namespace minifloat::torch_ops {

// Sets the options by which a shard's cast writes the whole's bytes: the origin, for random bits,
// and the amaxes of all ranks, from one all-reduce. check_tokens refuses random bits of x that is
// cut by tokens.
void place_shard(const PreparedRecipe& recipe, const Tensor& x, const OperandUse& row,
                 const OperandUse& col, const Sharding& sharding, int cut,
                 QuantizeOptions& options);

// Quantizes a shard of x, w or g as planned.   cut: the dimension of the matrix that the ranks cut
//
// Under stochastic rounding an origin places the shard of one matrix. It cannot place the rows of
// several experts, which the random counter numbers by the rows of the matrix that a cast reads, or
// two parts, which lie apart in the whole. Then the cast reads the whole matrix, with zeros for the
// other ranks' shards, and costs as much as the whole's.
Directions quantize_shard(const PreparedRecipe& recipe, const Tensor& x, const OperandUse& row,
                          const OperandUse& col, const CastPlan& plan, const Sharding& sharding,
                          int cut);

}  // namespace minifloat::torch_ops
