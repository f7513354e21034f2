// The six operands of a layer's three products: their places in a recipe, and how they are quantized, both directions
// of a tensor from one read.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "minifloat/recipe.h"
#include "ops/ops.h"
#include "products/products.h"

namespace minifloat::torch_ops {

using c10::SymInt;

// An operand's place in a recipe: its row of the amax history, and its random stream within the module.
enum Place { kFpropX, kFpropW, kDgradG, kDgradW, kWgradG, kWgradX, kPlaces };

// A recipe and the texts that its ops take, parsed once a process.
struct PreparedRecipe {
  Recipe recipe;
  std::string text, fprop, dgrad, wgrad;
  std::array<Spec, kPlaces> specs;
  std::array<std::string, kPlaces> spec_texts;  // "" for bf16, which no cast ever sees
  bool is_stochastic, is_delayed;
};
const PreparedRecipe& prepare(const std::string& text);

// One operand of one product, as a layer asks for it.
struct Wanted {
  Place place;
  bool is_wanted = true;
  bool decoded = false;  // also as the values that an exact product reads, where it follows at once
};

// Rowwise and columnwise.
using Directions = std::pair<QuantizedOperand, QuantizedOperand>;

// Running entries of histories, and the amaxes to raise them to once nothing of a forward pass can fail any more.
using PendingAmaxes = std::vector<std::pair<Tensor, Tensor>>;
void record(const PendingAmaxes& pending);

// What the operands of one module depend on besides their values.
struct ModuleState {
  Tensor rng;                        // undefined: nothing is stochastic
  std::int64_t stream = 0;           // of the module, beside the one that rng may hold
  Tensor history;                    // undefined: nothing is delayed
  PendingAmaxes* pending = nullptr;  // null: amaxes go to the history at once
};

// Both directions of x (rows, cols) from one read; bf16 directions are x itself and its transposed view.
Directions quantize_both(const PreparedRecipe& recipe, const Tensor& x, const Wanted& row,
                         const Wanted& col, const ModuleState& state);

// The same where they are given, as the op layer_operands has them.
Directions given_both(const PreparedRecipe& recipe, const char* name, at::TensorList given,
                      const Tensor& x, const Wanted& row, const Wanted& col);

// Requires an amax history, float32 (kPlaces, 1 + length) in memory of its own, on the device of x.
void check_history(const char* op, const Tensor& history, const Tensor& x);

// Returns what a product multiplies of a direction of quantize_both: the decoded values where they were asked for, else
// the codes.
ProductInput product_input(const PreparedRecipe& recipe, const QuantizedOperand& operand,
                           const Wanted& wanted);

// Returns the same of a direction of given_both, whose codes are in a form that layer_operands chose.
ProductInput given_input(const PreparedRecipe& recipe, const QuantizedOperand& operand,
                         const Wanted& wanted);

// x (…, K) as (M, K). name: for errors
Tensor as_matrix(const Tensor& x, const char* name = "x");

}  // namespace minifloat::torch_ops
