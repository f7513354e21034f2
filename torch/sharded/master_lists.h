// Lists of weights that every step casts or transposes, made once: a step passes only the masters.
// Every step checks the tensors and reads their addresses again, because memory may move between
// steps.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <string>
#include <utility>
#include <vector>

#include "sharded/rank_agreement.h"
#include "sharded/shard_cast.h"

namespace minifloat::torch_ops {

using Tensors = std::vector<at::Tensor>;
using Numbers = std::vector<std::int64_t>;

// One direction of a weight: of a matrix, or of E matrices that are cast alone.
struct MasterDirection {
  c10::intrusive_ptr<ShardCast> cast;  // of one matrix
  std::size_t owner;                   // the weight
  Tensors codes, scales, amaxes;       // of each matrix
};

class ReadyCasts;

// The directions of weights that a step casts from masters. A weight of experts (E, rows, cols) is
// cast as E matrices; its flat codes and shards are those of all its rows in order, so that a shard
// may begin and end within any expert.
class MasterCasts : public torch::CustomClassHolder {
 public:
  // owners, names: the weight of each direction, in their order, and its name; codes, scales,
  // amaxes: of each direction, codes of three dimensions of E matrices
  MasterCasts(const ShardCasts& casts, const Numbers& owners, const Texts& names,
              const Tensors& codes, const Tensors& scales, const Tensors& amaxes);

  // Checks shards of masters, and lists their casts to codes, which keep `self`. masters, starts:
  // of each weight; fragments: of each direction; none where codes are written to the flat codes
  static c10::intrusive_ptr<ReadyCasts> check(const c10::intrusive_ptr<MasterCasts>& self,
                                              const Tensors& masters, const Numbers& starts,
                                              const Tensors& fragments);
  const Texts& names() const { return names_; }
  const at::Tensor& like() const { return like_; }

 private:
  std::vector<PartialCast> list_casts(const Tensors& masters, const Numbers& starts,
                                      const Tensors& fragments) const;

  std::vector<MasterDirection> directions_;
  Texts names_;      // of each matrix of each direction
  at::Tensor like_;  // on the device of the weights; undefined without directions
};

// The casts of one step, checked and not yet run, so that ranks can agree first.
class ReadyCasts : public torch::CustomClassHolder {
 public:
  // owner: of the weights' memory; memory: what else the casts read and write
  ReadyCasts(std::vector<PartialCast> casts, c10::intrusive_ptr<MasterCasts> owner, Tensors memory)
      : casts_(std::move(casts)), owner_(std::move(owner)), memory_(std::move(memory)) {}
  // Casts; the second call casts nothing. agreement: of the ranks of the group, which hold the
  // masters
  void run(const std::string& group, const c10::intrusive_ptr<Agreement>& agreement);

 private:
  std::vector<PartialCast> casts_;
  c10::intrusive_ptr<MasterCasts> owner_;
  Tensors memory_;
};

// Matrices that are transposed after a gather.
class MatrixTransposes : public torch::CustomClassHolder {
 public:
  // from, to: matrices, or tensors of three dimensions that hold E; sizes: rows, cols, bits of each
  MatrixTransposes(const Tensors& from, const Tensors& to, const Numbers& sizes);
  void run() const;

 private:
  Tensors from_, to_;
  Numbers sizes_;
};

}  // namespace minifloat::torch_ops
