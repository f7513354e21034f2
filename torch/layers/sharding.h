// A layer whose weight the ranks of a group have cut: where each matrix is cut, and the collectives
// between ranks.
//
//     W (N, K)        cut along N (dimension 0)       cut along K (dimension 1)
//     x (M, K)        whole, or cut by tokens         columns
//     y = x · Wᵀ      columns                         a sum over the ranks
//     g (M, N)        columns                         whole
//     dx = g · W      a sum over the ranks            columns
//     dW = gᵀ · x     rows                            columns
//
// Where x is cut by tokens its codes are gathered, not its values: rowwise ones in forward, those
// that wgrad reads in backward. Until then a rank keeps the codes of its own tokens alone; dx is
// the sum of this rank's tokens.
//
// The collectives are torch's functional ones, which a trace records like any other op.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "ops/ops.h"

namespace minifloat::torch_ops {

using c10::SymInt;

enum class Matrix { kX, kW, kG };

struct Sharding {
  std::string group;  // as torch names it
  std::int64_t rank = 0, ranks = 1;
  std::int64_t weight_dim = 0;            // of W, which the ranks cut
  std::optional<std::int64_t> token_dim;  // of x (…, K), where the ranks cut it by tokens

  // The dimension along which the ranks cut a matrix of two dimensions; none: each has the whole.
  std::optional<int> cut_dim(Matrix matrix) const {
    if (matrix == Matrix::kW) return static_cast<int>(weight_dim);
    if (weight_dim == 0 && matrix == Matrix::kG) return 1;
    if (weight_dim == 1 && matrix == Matrix::kX) return 1;
    if (matrix == Matrix::kX && token_dim) return 0;
    return std::nullopt;
  }
};

// Requires ranks and dimensions that there are, of x (…, K).
void check_sharding(const char* op, const Sharding& sharding, const Tensor& x);

// A rank's rows of x: so many runs, of so many rows next to each other.
struct TokenRuns {
  SymInt count, length;
};
TokenRuns token_runs(const Sharding& sharding, c10::SymIntArrayRef x_shape);

// The largest amax of all ranks; NaN is larger than infinity.
Tensor largest_of_ranks(const Sharding& sharding, const Tensor& amax);

// The operand of all ranks' tokens. Tokens lie along the operand's rows, or its columns where
// columnwise.
QuantizedOperand gather_tokens(const Sharding& sharding, const TokenRuns& runs,
                               const QuantizedOperand& operand, bool columnwise);

// The sum over the ranks of dx (tokens of all, K): this rank's tokens of it.
Tensor scatter_sum(const Sharding& sharding, const TokenRuns& runs, const Tensor& dx);

// x as wgrad reads it, of all ranks' tokens: the first of `readers` layers gathers, the last one
// drops it.
class GatheredInput : public torch::CustomClassHolder {
 public:
  explicit GatheredInput(std::int64_t readers);
  QuantizedOperand get(const Sharding& sharding, const TokenRuns& runs,
                       const QuantizedOperand& shard);

 private:
  std::int64_t readers_, left_ = 0;
  QuantizedOperand operand_;
  std::mutex mutex_;
};

// Makes the class known to schemas, once; called before each of them, in whatever order the
// library's parts are loaded.
void register_gathered_input();

// The op, through the dispatcher: one rank's `linear` of its shard. See schemas.cpp.
Tensor linear_sharded(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                      const std::string& recipe, const std::string& group, std::int64_t rank,
                      std::int64_t ranks, std::int64_t weight_dim,
                      std::optional<std::int64_t> token_dim, const std::optional<Tensor>& rng,
                      const std::optional<Tensor>& amax_history, std::int64_t stream,
                      const std::optional<at::TensorList>& x_operands,
                      const std::optional<at::TensorList>& weight_operands,
                      const std::optional<c10::intrusive_ptr<GatheredInput>>& gathered);

}  // namespace minifloat::torch_ops
