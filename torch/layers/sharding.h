// A layer, or experts, whose weight is cut over the ranks of a group: where each matrix is cut, and
// the collectives between ranks.
//
//     W (N, K)        cut along N (dimension 0)       cut along K (dimension 1)
//     x (M, K)        whole, or cut by tokens         columns
//     y = x · Wᵀ      columns                         a sum over the ranks
//     g (M, N)        columns                         whole
//     dx = g · W      a sum over the ranks            columns
//     dW = gᵀ · x     rows                            columns
//
// dx is that sum where the caller says so (sums_dx); else each rank's part of it.
//
// Where x is cut by tokens, codes of x are gathered, not values: the rowwise ones in forward, the
// ones for wgrad in backward. Between the two a rank saves the codes of this rank's tokens. dx is
// the sum for this rank's tokens.
//
// The collectives are torch's functional ones, which a trace records like any other op.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ops/ops.h"

namespace minifloat::torch_ops {

using c10::SymInt;

enum class Matrix { kX, kW, kG };

struct Sharding {
  std::string group;  // its name in torch.distributed
  std::int64_t rank = 0, ranks = 1;
  std::int64_t weight_dim = 0;            // of W, which the ranks cut
  std::optional<std::int64_t> token_dim;  // of x (…, K), where the ranks cut it by tokens
  bool sums_dx = false;  // whether backward sums dx over the ranks, where x is whole
  // The parts of W along weight_dim, each cut, of which a rank has its cuts one after the other: 2
  // of experts whose gate and up are one weight.
  std::int64_t parts = 1;

  // Returns the dimension along which a matrix is cut; none: each rank has the whole matrix.
  std::optional<int> cut_dim(Matrix matrix) const {
    if (matrix == Matrix::kW) return static_cast<int>(weight_dim);
    if (weight_dim == 0 && matrix == Matrix::kG) return 1;
    if (weight_dim == 1 && matrix == Matrix::kX) return 1;
    if (matrix == Matrix::kX && token_dim) return 0;
    return std::nullopt;
  }
};

// Requires ranks of the group and dimensions of x (…, K).
void check_sharding(const char* op, const Sharding& sharding, const Tensor& x);

// The rows of x of one rank: `count` runs of `length` rows next to each other.
struct TokenRuns {
  SymInt count, length;
};
TokenRuns token_runs(const Sharding& sharding, c10::SymIntArrayRef x_shape);

// Returns the sum of the tensors of a group's ranks. begin_sum: for wait_for.
Tensor sum_of_ranks(const std::string& group, const Tensor& t);
Tensor begin_sum(const std::string& group, const Tensor& t);

// Returns the largest amax of all ranks; NaN is larger than infinity.
Tensor largest_of_ranks(const Sharding& sharding, const Tensor& amax);

// Returns the result of a collective that has begun. Products that are launched between the two run
// beside it.
Tensor wait_for(const Tensor& begun);

// A gather of the operand of all ranks' tokens, which begins when it is made. Tokens are the
// operand's rows; its columns where columnwise.
class TokenGather {
 public:
  TokenGather(const Sharding& sharding, const TokenRuns& runs, const QuantizedOperand& operand,
              bool columnwise);
  // Waits for it, and returns the operand; the same one again when called again.
  QuantizedOperand finish();

 private:
  std::vector<Tensor*> cut();  // the parts of the operand that have tokens

  std::int64_t ranks_;
  TokenRuns runs_;
  QuantizedOperand operand_;  // of this rank's tokens, then of all
  std::int64_t dim_;          // of the tokens
  Tensor begun_;
};

// Begins the sum over the ranks of dx (all tokens, K), and returns this rank's tokens of it, for
// wait_for.
Tensor begin_scatter_sum(const Sharding& sharding, const TokenRuns& runs, const Tensor& dx);

// x as wgrad reads x, with the tokens of all ranks: the first of `readers` layers gathers x, the
// last one drops it. Each calls begin, then get.
//   columnwise: whether tokens are the columns of the codes
class GatheredInput : public torch::CustomClassHolder {
 public:
  explicit GatheredInput(std::int64_t readers);
  void begin(const Sharding& sharding, const TokenRuns& runs, const QuantizedOperand& shard,
             bool columnwise);
  QuantizedOperand get();

 private:
  std::int64_t readers_, left_ = 0;
  std::optional<TokenGather> gather_;
  std::mutex mutex_;
};

// Registers the class, once. Called before each schema that names the class: the order in which the
// library's files register is not defined.
void register_gathered_input();

}  // namespace minifloat::torch_ops
