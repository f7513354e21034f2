// What both passes of an MLP share: mlp.cpp is the forward pass, mlp_gradients.cpp the backward
// pass and the casts of h, which both call.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "layers/layer_state.h"
#include "layers/passes.h"
#include "ops/activation.h"

namespace minifloat::torch_ops {

inline constexpr const char* kMlp = "mlp";

// Which gradients backward computes.
struct MlpNeeds {
  NeededGradients inputs, output;
};

// Gate and up as the forward pass computed them, (M, I).
struct Gates {
  Tensor gate;
  std::optional<Tensor> up;

  ActivationArguments of(const std::string& activation) const {
    return {.op = "activation", .gate = gate, .up = up, .activation = activation};
  }
};

// Quantizes h, and writes its values only for an operand under bf16.
Directions quantize_h(const PreparedRecipe& prepared, const Gates& gates,
                      const std::string& activation, const OperandUse& row, const OperandUse& col,
                      CastContext state);

// Returns whether forward saves h as wgrad reads it: where backward decodes the codes of fprop, and
// where a history takes the amax of h's transform, which forward is to write.
bool saves_h(const PreparedRecipe& prepared);

// Values that backward reads besides the saved tensors: x columnwise and the first weights, h
// columnwise and the last weight, three tensors an operand; then gate and up.
struct MlpState : LayerState {
  MlpState(const Tensor& x, const Layers& of_inputs, const Layers& of_output,
           const PreparedRecipe& recipe, std::string of, const MlpNeeds& needed);

  // Returns the gradients of x, of the weights and of the biases.
  std::vector<Tensor> gradients(const std::vector<Tensor>& saved,
                                const std::vector<Tensor>& grads) const override;

  SavedLayers inputs, output;
  std::string activation;
  std::vector<SymInt> x_shape;
  MlpNeeds needs;
};

}  // namespace minifloat::torch_ops
