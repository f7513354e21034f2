// What the layers of linear.cpp, mlp.cpp and grouped_mm.cpp call: the products of weights that
// share their input forward, and the gradients of one layer backward, from a gradient that each
// caller casts itself (quantize_both). The products of experts are a layer whose rows lie in
// groups. A weight's gradient is added to its sum here, for which the running node of autograd is
// read.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "layers/arguments.h"
#include "layers/operands.h"

namespace minifloat::torch_ops {

// One forward pass of layers that share their input x (M, K).
struct ForwardPass {
  const PreparedRecipe& prepared;
  const Layers& layers;
  const NeededGradients& needs;
  at::ScalarType dtype, out_dtype;  // of x and of y
  SymInt k;                         // of x
  std::vector<Tensor>* saved;       // what backward reads, three tensors an operand; null: none
  CurrentAmaxes* deferred_amaxes =
      nullptr;  // takes the amaxes instead of the histories; see linear.cpp
  // Takes the amax that a later cast of the weight needs, as GroupedCall's. Null: it is not kept.
  Tensor* keeps_amax = nullptr;
  // Whether an op returns what backward reads of the weight.
  bool returns_saved = false;
  bool returns_swizzled = false;  // that with swizzled scales

  PlannedProduct fprop() const {
    return plan_product(prepared.recipe.fprop, prepared.fprop, layers.weights[0].device(),
                        layers.groups.has_value());
  }
  // Returns the state of a weight's operands, and of those of x and g.
  CastContext state_of(std::size_t i) const;
  CastContext state_of_rows(std::size_t i) const;
  // Saves an operand, with the amax of its codes: recomputed forwards save the same tensors.
  void save(const QuantizedOperand& operand, Place place) const;
};

// Returns an operand's amax where products read it with the codes; undefined: they do not. Under
// delayed scaling it is for the history alone, and a cast that raises one returns none.
Tensor amax_of_codes(const Spec& spec, const QuantizedOperand& operand);

// Quantizes x of a forward pass: rowwise as fprop reads x, columnwise as backward reads x. Operands
// of the caller take the place of x's values, of which only the shape is read then.
Directions input_operands(const ForwardPass& pass, const char* op, const Tensor& x,
                          const OperandUse& row, const OperandUse& col);

// Returns weight i in both directions: quantized here, or by the caller. Where backward quantizes
// it again (casts_later), the columnwise direction has its amax alone.
//   amax: that the columnwise cast takes; undefined: it finds its own
Directions weight_operands(const ForwardPass& pass, std::size_t i, const OperandUse& row,
                           const OperandUse& col, bool casts_later, const Tensor& amax = {});

// Returns y (M, N) of each weight, from x. Saves x as wgrad reads it, then each weight as dgrad
// reads it, or, where the layers recompute it, the weight itself.   op: for errors of x
std::vector<Tensor> multiply_by_weights(const ForwardPass& pass, const char* op, const Tensor& x);

// Quantizes x, saves it as wgrad reads it, and returns it as fprop reads it.
std::pair<QuantizedOperand, OperandUse> cast_input(const ForwardPass& pass, const char* op,
                                                   const Tensor& x);

// Returns the products from x as it was cast for fprop, and saves the weights alone.
//   row: of x; first: the operands of the first weight, or none
std::vector<Tensor> multiply_operand(const ForwardPass& pass, const QuantizedOperand& x,
                                     const OperandUse& row, std::optional<Directions> first = {});

// Returns y (M, N) with the leading dimensions of x, which may have the tokens of one rank.
Tensor as_output(Tensor y, const Tensor& x, const Sharding* sharding);

// What backward reads of layers besides the saved tensors.
struct SavedLayers {
  SavedLayers(const Layers& layers, const PreparedRecipe& recipe, at::ScalarType x_dtype);
  SavedLayers(const PreparedRecipe& of_recipe, at::ScalarType dtype)
      : recipe(of_recipe), x_dtype(dtype) {}

  const PreparedRecipe& recipe;
  PerLayer<std::int64_t> streams;
  at::ScalarType x_dtype;
  Accumulation accumulation;
  PerLayer<Tensor> main_grads;  // one a weight, or none
  // Dtypes of dW as the product writes it: the weight's after autocast. Autocast does not cast a
  // weight that is no tensor subclass and whose codes the caller passes: its dW has x's dtype.
  PerLayer<at::ScalarType> product_dtypes;
  PerLayer<at::ScalarType> weight_dtypes, bias_dtypes;
  PerLayer<int> bias_index;
  PerLayer<std::array<SymInt, 2>> features;  // of each weight, (N, K)
  PerLayer<Tensor> histories, rng;
  std::optional<Sharding> sharding;  // none: this process has the whole weights
  std::optional<RowGroups> groups;   // as in Layers

  PlannedProduct dgrad(const at::Device& device) const {
    return plan_product(recipe.recipe.dgrad, recipe.dgrad, device, groups.has_value());
  }
  PlannedProduct wgrad(const at::Device& device) const {
    return plan_product(recipe.recipe.wgrad, recipe.wgrad, device, groups.has_value());
  }
  // Returns the state of a weight's operands, and of those of x and g.
  CastContext state_of(std::size_t i) const;
  CastContext state_of_rows(std::size_t i) const;
};

// Returns an operand of backward that was saved, or that a cast of backward left as codes.
ProductInput backward_input(const SavedLayers& layers, const QuantizedOperand& operand,
                            Place place);
// Returns an operand of backward from its three saved tensors, of which the first is at `i`.
ProductInput saved_input(const SavedLayers& layers, const std::vector<Tensor>& saved, std::size_t i,
                         Place place);
// Returns weight `i` as dgrad reads it, quantized again where the layers recompute it.
//   saved: three tensors of x, then three of each weight
ProductInput saved_weight(const SavedLayers& layers, const std::vector<Tensor>& saved,
                          std::size_t i);

// Returns g · W, (M, K).   g: cast as dgrad reads it; n: the features of g
Tensor input_gradient(const SavedLayers& layers, const QuantizedOperand& g, const OperandUse& row,
                      const ProductInput& weight, const SymInt& n, at::ScalarType dtype,
                      const at::Device& device);
// Returns gᵀ · x, (N, K), or of experts its transpose, in weight i's dtype, or fp32 where gradients
// are accumulated. Adds it to the weight's sum instead, where there is one, and returns what
// autograd receives.
//   m: the tokens; edge: of the weight, among the inputs of the running backward node
Tensor weight_gradient(const SavedLayers& layers, std::size_t i, const QuantizedOperand& g,
                       const OperandUse& col, const ProductInput& x, const SymInt& m,
                       const at::Device& device, std::size_t edge);
// Returns the sum of g over the tokens, or over those of each group, in the dtype of bias `bias`.
Tensor bias_gradient(const SavedLayers& layers, int bias, const Tensor& g);

}  // namespace minifloat::torch_ops
