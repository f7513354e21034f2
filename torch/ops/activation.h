// An activation and its gradients, as values and as casts, for layers.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "ops/ops.h"

namespace minifloat::torch_ops {

// The arguments that all ops of activations take. The tensors must outlive it.
struct ActivationArguments {
  const Tensor& gate;               // (rows, cols), fp32 or bf16
  const std::optional<Tensor>& up;  // the same; none: h = act(gate)
  const std::string& activation;    // "silu", "gelu" or "gelu_tanh"
};

// Return h = act(gate) · up, and the gradients of gate and up; without up its gradient is empty.
Tensor activation(const ActivationArguments& of);
std::tuple<Tensor, Tensor> activation_backward(const Tensor& dh, const ActivationArguments& of);

// Quantizes h as `quantize` would.
Directions quantize_activation(const ActivationArguments& of, const std::string& row,
                               const std::string& col, const QuantizeOptions& options);

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
