// ShardCast: the cast of one direction of a weight whose master is held in shards. ZeRO's lists
// (master_lists.cpp) and FSDP2's gathers (gather_batch.h) describe every cast by it.
//
//     ShardCast                     spec, direction, sizes, compute dtype: constant between steps
//     describe, place_shard, …      a PartialCast of it, with the memory of one step
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <string>
#include <vector>

#include "minifloat/partial_cast.h"

namespace minifloat::torch_ops {

using Texts = std::vector<std::string>;

// One direction of a matrix W (rows, cols): a weight, or rows of a weight that a rank casts as if
// they were a weight.
class ShardCast : public torch::CustomClassHolder {
 public:
  // rounds_to_bf16: whether masters are rounded to bfloat16 before they are cast
  ShardCast(const std::string& spec, bool columnwise, std::int64_t rows, std::int64_t cols,
            bool rounds_to_bf16);
  ShardCast(const Spec& spec, bool columnwise, std::int64_t rows, std::int64_t cols, DType compute);

  const Spec& spec() const { return spec_; }
  bool columnwise() const { return columnwise_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t cols() const { return cols_; }
  DType compute() const { return compute_; }

  // Counts of W's numbers: amaxes as the casts pack them, scales, and amaxes of the operand.
  std::int64_t packed_amaxes() const;
  std::int64_t scales() const;
  std::int64_t amaxes() const;
  // Bytes of W's codes, in W's order.
  std::int64_t code_bytes() const;

  PartialCast describe() const;  // without memory
  // Allocates W in this direction on the device of `like`: codes, scale, amax, as read. One-byte
  // scales have dtype uint8.
  std::vector<at::Tensor> new_operand(const at::Tensor& like) const;

 private:
  Spec spec_;
  bool columnwise_;
  std::int64_t rows_, cols_;
  DType compute_;
};
using ShardCasts = std::vector<c10::intrusive_ptr<ShardCast>>;

// Points a cast at the shard of its master, from flat element `start` on. like: a tensor on the
// device of the call
void place_shard(const char* op, PartialCast& cast, const at::Tensor& master, std::int64_t start,
                 const at::Tensor& like);

// The outputs of a cast, of as many bytes as the cast writes.
struct CastOutputs {
  const at::Tensor& codes;  // the shard's fragment of the flat codes, or all of them
  bool is_fragment;
  const at::Tensor& scale;
  const at::Tensor& amax;
};
// Points a cast that has its shard at its outputs.
void place_outputs(const char* op, const ShardCast& description, PartialCast& cast,
                   const CastOutputs& outputs, const at::Tensor& like);

// Points every cast at its numbers of a packed tensor, null for none. Returns the size of the
// packed tensor.
std::int64_t place_amaxes(std::vector<PartialCast>& casts, std::uint32_t* packed);

// Returns whether a cast's rule reads values, so that choose_scales runs before the cast.
bool any_reads_values(const std::vector<PartialCast>& casts);

// Returns the amaxes of the shards, int32, as place_amaxes packs them.
at::Tensor measure_amaxes(std::vector<PartialCast>& casts, const at::Tensor& like);

// sizes: rows, cols, bits
Transpose transpose_of(const at::Tensor& from, const at::Tensor& to, const std::int64_t* sizes,
                       const at::Tensor& like);
void run_transposes(const std::vector<Transpose>& jobs, const at::Tensor& like);
void run_copies(const std::vector<Copy>& copies, const at::Tensor& like);

}  // namespace minifloat::torch_ops
