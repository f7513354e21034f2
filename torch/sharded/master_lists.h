// Lists of weights that every step casts or transposes, made once: a step passes only the masters.
// Every step checks the tensors and reads their addresses again, because memory may move between
// steps.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <string>
#include <vector>

#include "sharded/rank_agreement.h"
#include "sharded/shard_cast.h"

namespace minifloat::torch_ops {

using Tensors = std::vector<at::Tensor>;
using Numbers = std::vector<std::int64_t>;

// The directions of weights that a step casts from masters.
class MasterCasts : public torch::CustomClassHolder {
 public:
  // owners: the weight of each direction, in their order; agreement: of the ranks that hold the
  // masters
  MasterCasts(ShardCasts casts, Numbers owners, Texts names, Tensors codes, Tensors scales,
              Tensors amaxes, c10::intrusive_ptr<Agreement> agreement);

  // Casts the shards of masters to codes. masters, starts: of each weight; fragments: of each
  // direction; none where codes are written to the flat codes
  void quantize(const Tensors& masters, const Numbers& starts, const Tensors& fragments,
                const std::string& group) const;

 private:
  ShardCasts casts_;
  Numbers owners_;
  Texts names_;
  Tensors codes_, scales_, amaxes_;
  c10::intrusive_ptr<Agreement> agreement_;
};

// Matrices that are transposed after a gather.
class MatrixTransposes : public torch::CustomClassHolder {
 public:
  // sizes: rows, cols, bits of each
  MatrixTransposes(Tensors from, Tensors to, Numbers sizes);
  void run() const;

 private:
  Tensors from_, to_;
  Numbers sizes_;
};

}  // namespace minifloat::torch_ops
