// The arguments of the ops of normalisations, and the casts of their results.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "minifloat/core/norm.h"
#include "ops/ops.h"

namespace minifloat::torch_ops {

// The arguments that all ops of a normalisation take. The tensors must outlive it.
struct NormArguments {
  const char* op;
  const Tensor& x;  // (…, D)
  const std::optional<Tensor>&weight, &bias;
  const std::string& kind;  // "rms", "rms_rounded", "layer"
  double eps;
  const Tensor* residual = nullptr;  // null: x alone is normalised
};

// Returns the options of a cast from an op's arguments.
QuantizeOptions options_of(const char* op, const std::optional<Tensor>& amax_row,
                           const std::optional<Tensor>& amax_col, const std::optional<Tensor>& rng,
                           std::int64_t stream_row, std::int64_t stream_col,
                           c10::SymIntArrayRef origin, bool decoded_row, bool decoded_col);

// Raises where an argument is not as expected. Returns the kind.
NormKind check_norm(const NormArguments& a);

// Quantizes the normalised rows of x, (M, D), as `quantize` would.   sum: of x and the residual, if
// there is one
struct QuantizedNorm {
  Tensor sum;
  QuantizedOperand row, col;
};
QuantizedNorm quantize_norm(const NormArguments& a, const std::string& row, const std::string& col,
                            const QuantizeOptions& options);

// The results of quantize_add_norm: the sum, and the eight tensors of `quantize`.
using NineTensors =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Calls run, which returns x + residual before tensors that have no derivative, and gives the sum
// its history.
std::vector<Tensor> with_history_of_sum(const Tensor& x, const Tensor& residual,
                                        const std::function<std::vector<Tensor>()>& run);

// The gradients that backward computes; those that are not needed are undefined.
struct NormNeeds {
  bool x, weight, bias;
};
struct NormGradients {
  Tensor x, weight, bias;
};
// Returns the gradients at x from that of the result. Where ops are traced or differentiated they
// are compositions of torch's ops, so that a compiler fuses them with what is around them.
NormGradients norm_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                            const Tensor& bias, NormKind kind, double eps, const NormNeeds& needs);

// Returns 1 / √(…) of each row of x, and of a LayerNorm its mean: float32 (…, 1), from memory.
std::pair<Tensor, Tensor> direct_norm_statistics(const Tensor& x, NormKind kind, double eps);

}  // namespace minifloat::torch_ops
