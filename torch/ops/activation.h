// An activation and its gradients, as values and as casts, for layers: between dense layers, or
// SwiGLU between the products of experts. The kernels are those of minifloat/experts.h.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/ops.h"

namespace minifloat::torch_ops {

// Absent arguments.
inline const std::optional<Tensor> kNoTensor;
inline const std::string kSilu = "silu";

// The arguments that all ops of activations take. The tensors must outlive it.
struct ActivationArguments {
  const char* op;  // the caller, which errors name
  // fp32 or bf16. Between dense layers (…, cols), as up is; none: h = act(gate). Of experts
  // (rows, width), as up is, or (rows, 2 width) with up in it.
  const Tensor& gate;
  const std::optional<Tensor>& up;
  const Tensor* weights = nullptr;  // of experts: fp32, one a row, which multiply h
  // Of experts: the form (core/swiglu.h), the place of each row's weight, and the groups of rows.
  std::optional<double> limit = {};
  double alpha = 1;
  bool interleaved = false;
  const std::optional<Tensor>&pairs = kNoTensor, &groups = kNoTensor;
  const std::string& activation = kSilu;  // "silu", "gelu" or "gelu_tanh"; of experts "silu"

  // Returns whether gate and up are in one matrix.
  bool is_joint() const { return weights && !up; }
  c10::SymInt rows() const { return gate.sym_size(0); }
  c10::SymInt width() const { return is_joint() ? gate.sym_size(1) / 2 : gate.sym_size(1); }
  // Returns a tensor with the shape, dtype and device of h, and other values.
  Tensor like_h() const { return is_joint() ? gate.narrow_symint(1, 0, width()) : gate; }
};

// Requires numbers above zero, and columns in turns of one matrix alone.
void check_form(const char* op, std::optional<double> limit, double alpha, bool interleaved,
                bool has_up);
// Requires the arguments of SwiGLU, and real tensors within their memory.
void check_swiglu(const ActivationArguments& of);

// Returns h = act(gate) · up, times the weights of experts, whose h is differentiable.
Tensor activation(const ActivationArguments& of);

// The gradients, shaped as the arguments; empty or undefined where there is no argument.
struct ActivationGradients {
  Tensor gate, up, weights;
  // Where the caller asks for them: the amaxes of the rows and of each group's columns of gate's,
  // then of up's.
  std::vector<Tensor> amaxes = {};
};
ActivationGradients activation_backward(const Tensor& dh, const ActivationArguments& of,
                                        bool amaxes = false);

// Quantizes h as `quantize` would. The groups of experts are those of the options.
Directions quantize_activation(const ActivationArguments& of, const std::string& row,
                               const std::string& col, const QuantizeOptions& options);

// The functions below are of dense layers.

// The gradients of gate and up as products read them, and h as that of the weight after it.
struct QuantizedGradients {
  Directions gate, up;  // rowwise and columnwise
  QuantizedOperand h;   // columnwise
};

// What the backward of an activation casts.
struct GradientCasts {
  const std::string &row, &col, &h_col;  // spec texts; "": without that direction, or h
  const QuantizeOptions &gate, &up, &h;  // of h: those of a columnwise operand
};

// Quantizes the gradients of gate and up, and h, as `quantize` would.   dh: as gate
QuantizedGradients quantize_activation_backward(const Tensor& dh, const ActivationArguments& of,
                                                const GradientCasts& casts);

// The gradients of gate and up as values, beside d_gate, which is written over dh.
struct GradientValues {
  Tensor up;           // empty where there is no up
  Tensor amaxes;       // fp32: of d_gate and, with an up, of d_up, untransformed
  QuantizedOperand h;  // columnwise
};

// Replaces dh by the gradient of gate, computes that of up and the amaxes of both, and quantizes h.
//   h_col: a spec text; "": without h; h: the options of a columnwise operand
GradientValues activation_gradients_(const Tensor& dh, const ActivationArguments& of,
                                     const std::string& h_col, const QuantizeOptions& h);

}  // namespace minifloat::torch_ops
