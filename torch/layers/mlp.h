// Both passes of an MLP: mlp.cpp is the forward pass, mlp_gradients.cpp the backward pass and the
// casts of h, which both call. mlp_ops.cpp has both as the ops that torch.compile records.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
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

// Both layers of an MLP: the weights that read x, and the one that reads h.
struct Mlp {
  Layers inputs, output;
  const std::string& activation;

  bool is_gated() const { return inputs.weights.size() == 2; }
};

// Requires 2 or 3 weights, and as many of each list, or none.
void check_counts(const char* op, std::size_t n,
                  std::initializer_list<std::pair<const char*, std::size_t>> lists);

// Requires weights (I, K), (I, K) and (N, I), or (I, K) and (N, I), and an activation.
void check_mlp(const Tensor& x, const Mlp& mlp, const PreparedRecipe& prepared);

// One forward pass of an MLP. Its members outlive it.
struct MlpForward {
  const Mlp& mlp;
  const PreparedRecipe& prepared;
  const MlpNeeds& needs;
  at::ScalarType dtype;        // of x
  std::vector<Tensor>* saved;  // what mlp_gradients reads; null: no gradient is needed
  bool returns_saved = false;  // as in ForwardPass
  std::array<bool, 2> returns_swizzled = {};  // the weights of x, and that of h

  ForwardPass inputs() const { return pass_of(mlp.inputs, needs.inputs, 0); }
  ForwardPass output() const { return pass_of(mlp.output, needs.output, 1); }

 private:
  ForwardPass pass_of(const Layers& layers, const NeededGradients& needed, std::size_t i) const;
};

// Returns y (M, N) from the products of x, and saves what backward reads of h and after it.
Tensor multiply_hidden(const MlpForward& pass, const std::vector<Tensor>& products);

// What backward reads of an MLP besides the saved tensors.
struct MlpLayers {
  SavedLayers inputs, output;
  std::string activation;
  MlpNeeds needs;

  // Returns the weights that read x.
  std::size_t count() const { return inputs.features.size(); }
};

// Returns the gradients of x (M, K), of the weights and of the biases.
//   saved: x columnwise and the first weights, h columnwise and the last weight, three tensors an
//   operand; then gate and up
std::vector<Tensor> mlp_gradients(const MlpLayers& layers, const std::vector<Tensor>& saved,
                                  const Tensor& dy);

struct MlpState : LayerState {
  MlpState(const Tensor& x, const Mlp& mlp, const PreparedRecipe& recipe, const MlpNeeds& needed);

  // Returns the gradients of x, of the weights and of the biases.
  std::vector<Tensor> gradients(const std::vector<Tensor>& saved,
                                const std::vector<Tensor>& grads) const override;

  MlpLayers layers;
  std::vector<SymInt> x_shape;
};

}  // namespace minifloat::torch_ops
