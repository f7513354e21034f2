// The arguments of the ops of SwiGLU, the cast of its result, and calls of what lies between the
// products of experts.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/ops.h"

namespace minifloat::torch_ops {

// The arguments that all ops of SwiGLU take. The tensors must outlive it.
struct SwiGluArguments {
  const char* op;
  const Tensor& product;
  const std::optional<Tensor>& other;
  const Tensor& weights;
  std::optional<double> limit;
  double alpha;
  bool interleaved;
  const std::optional<Tensor>&pairs, &groups;

  c10::SymInt rows() const { return product.sym_size(0); }
  c10::SymInt width() const { return other ? product.sym_size(1) : product.sym_size(1) / 2; }
  // Returns a tensor with the shape, dtype and device of h, and other values.
  Tensor like_h() const { return product.narrow_symint(1, 0, width()); }
};

// Requires numbers above zero, and columns in turns of one product alone.
void check_form(const char* op, std::optional<double> limit, double alpha, bool interleaved,
                bool has_other);
// Requires a base of the sums of slots: float32 of their shape, on their device.
void check_base(const char* op, const Tensor& base, c10::SymIntArrayRef shape, at::Device device);
// Requires the arguments of `of`, and real tensors within their memory.
void check_swiglu(const SwiGluArguments& of);

// Quantizes h, (rows, width), as `quantize` would. The groups are those of the options.
Directions quantize_swiglu(const SwiGluArguments& of, const std::string& row,
                           const std::string& col, const QuantizeOptions& options);

// The gradients of the product, of the other one and of the weights; and, where the caller asks for
// them, the amaxes of the rows and of each group's columns of the first, and of the second.
using SwiGluGradientTensors = std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>>;

// The ops of these names, through the dispatcher. The first, the third and the fourth are
// differentiable.
Tensor swiglu(const SwiGluArguments& of);
SwiGluGradientTensors swiglu_backward(const Tensor& dh, const SwiGluArguments& of,
                                      bool amaxes = false);
Tensor take_rows(const Tensor& x, const Tensor& index, const c10::SymInt& slots,
                 const std::optional<Tensor>& places);
Tensor add_slots(const Tensor& rows, const Tensor& places, const std::optional<Tensor>& base,
                 const std::optional<Tensor>& pairs = std::nullopt);

}  // namespace minifloat::torch_ops
