// What a partial cast is made from tensors with, one direction of one weight at a time: by the ops (master_weights.cpp)
// and by the lists that are kept from step to step (kept_lists.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "minifloat/partial_cast.h"

namespace minifloat::torch_ops {

using Texts = std::vector<std::string>;

// From its spec and four numbers: columnwise, rows, cols, whether the compute dtype is bf16.
PartialCast cast_of(const std::string& spec, const std::int64_t* numbers);

// The shard of the master from flat element `start` on. like: the first one
void place_shard(const char* op, PartialCast& cast, const at::Tensor& master, std::int64_t start,
                 const at::Tensor& like);

// Points a cast that has its shard at its outputs, which have just the bytes that it writes.
struct CastOutputs {
  const at::Tensor& codes;  // the shard's fragment of the wire, or all of it
  bool is_fragment;
  const at::Tensor& scale;
  const at::Tensor& amax;
};
void place_outputs(const char* op, PartialCast& cast, const CastOutputs& outputs,
                   const at::Tensor& like);

// amaxes -> all-reduce -> codes, scales, amax. names: of the casts' weights; group: "" for one process alone
void quantize_masters(const char* op, std::vector<PartialCast>& casts, const Texts& names,
                      const std::string& group, const at::Tensor& like);

// sizes: rows, cols, bits
Transpose transpose_of(const at::Tensor& from, const at::Tensor& to, const std::int64_t* sizes,
                       const at::Tensor& like);
void run_transposes(const std::vector<Transpose>& jobs, const at::Tensor& like);

}  // namespace minifloat::torch_ops
