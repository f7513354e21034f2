// The arguments of the ops of normalisations, and the casts of their results.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

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
};

// Raises where an argument is not as expected. Returns the kind.
NormKind check_norm(const NormArguments& a);

// Quantizes the normalised rows of x, (M, D), as `quantize` would: rowwise, columnwise.
std::pair<QuantizedOperand, QuantizedOperand> quantize_norm(const NormArguments& a,
                                                            const std::string& row,
                                                            const std::string& col,
                                                            const QuantizeOptions& options);

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
