// What the layers of linear.cpp and mlp.cpp call: the products of weights that share
// their input forward, and the gradients of one layer backward. A weight's gradient is added to its
// sum here, for which the running node of autograd is read.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "layers/arguments.h"
#include "layers/operands.h"

namespace minifloat::torch_ops {

// One forward pass of layers that share their input x (M, K).
struct ForwardPass {
  const PreparedRecipe& prepared;
  const Layers& layers;
  const Needs& needs;
  at::ScalarType dtype;        // of x
  SymInt k;                    // of x
  PendingAmaxes& amaxes;       // of delayed operands; the caller records them
  std::vector<Tensor>* saved;  // what backward reads, three tensors an operand; null: no backward

  PlannedProduct fprop() const {
    return plan_product(prepared.recipe.fprop, prepared.fprop, layers.weights[0].device());
  }
  ModuleState state_of(std::size_t i) const;
  // Saves an operand, except an amax that the spec lacks: recomputed forwards save as many tensors.
  void save(const QuantizedOperand& operand, Place place) const;
};

// Quantizes x of a forward pass: rowwise as fprop reads x, columnwise as backward reads x. Operands
// of the caller take the place of x's values, of which only the shape is read then.
Directions input_operands(const ForwardPass& pass, const char* op, const Tensor& x,
                          const Needed& row, const Needed& col);

// Returns x as fprop reads it, from a direction of x: in the form that all weights' products share.
ProductInput forward_input(const ForwardPass& pass, const QuantizedOperand& x, const Needed& row,
                           bool is_prequantized);

// Returns y (M, N) of each weight, and saves each weight as dgrad reads it, or, where the layers
// recompute it, the weight itself.   x: as fprop reads it
std::vector<Tensor> multiply_weights(const ForwardPass& pass, const ProductInput& x);

// Returns y (M, N) with the leading dimensions of x, which may have the tokens of one rank.
Tensor as_output(Tensor y, const Tensor& x, const Sharding* sharding);

// What backward reads of layers besides the saved tensors.
struct SavedLayers {
  SavedLayers(const Layers& layers, const PreparedRecipe& recipe, at::ScalarType x_dtype);

  const PreparedRecipe& recipe;
  std::vector<std::int64_t> streams;
  at::ScalarType x_dtype;
  Accumulation accumulation;
  std::vector<Tensor> main_grads;  // one a weight, or none
  // Dtypes of dW as the product writes it: the weight's after autocast. A weight that is no tensor
  // subclass and whose codes the caller passes is not cast: its dW has x's dtype.
  std::vector<at::ScalarType> product_dtypes;
  std::vector<at::ScalarType> weight_dtypes, bias_dtypes;
  std::vector<int> bias_index;
  std::vector<std::array<SymInt, 2>> features;  // of each weight, (N, K)
  std::vector<Tensor> histories, rng;

  ModuleState state_of(std::size_t i, const Sharding* sharding = nullptr) const;
};

// Returns an operand of backward from its three saved tensors, of which the first is at `i`.
ProductInput saved_input(const SavedLayers& layers, const std::vector<Tensor>& saved, std::size_t i,
                         Place place);
// Returns weight `i` as dgrad reads it, quantized again where the layers recompute it.
//   saved: three tensors of x, then three of each weight; sharding: of the weight, or null
ProductInput saved_weight(const SavedLayers& layers, const std::vector<Tensor>& saved,
                          std::size_t i, const Sharding* sharding = nullptr);

// Returns g · W, (M, K).   g: cast as dgrad reads it; n: the features of g
Tensor input_gradient(const SavedLayers& layers, const QuantizedOperand& g, const Needed& row,
                      const ProductInput& weight, const SymInt& n, at::ScalarType dtype,
                      const at::Device& device);
// Returns gᵀ · x, (N, K), in weight i's dtype, or fp32 where gradients are accumulated. Adds it to
// the weight's sum instead, where there is one, and returns what autograd receives.
//   m: the tokens; edge: of the weight, among the inputs of the running backward node
Tensor weight_gradient(const SavedLayers& layers, std::size_t i, const QuantizedOperand& g,
                       const Needed& col, const ProductInput& x, const SymInt& m,
                       const at::Device& device, std::size_t edge);
// Returns the sum of g over the tokens, in the dtype of bias `bias`.
Tensor bias_gradient(const SavedLayers& layers, int bias, const Tensor& g);

}  // namespace minifloat::torch_ops
