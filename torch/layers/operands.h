// The six operands of a layer's three products: one table of them, and how they are quantized, both
// directions of a matrix from one read.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "layers/sharding.h"
#include "minifloat/recipe.h"
#include "ops/ops.h"
#include "products/products.h"

namespace minifloat::torch_ops {

// An operand: its row of the amax history, and of the table below.
enum Place { kFpropX, kFpropW, kDgradG, kDgradW, kWgradG, kWgradX, kPlaces };

struct OperandInfo {
  Matrix matrix;
  bool columnwise;   // whether its product reads the transpose
  const char* name;  // also of its random stream within the module
};
inline constexpr std::array<OperandInfo, kPlaces> kOperands = {{{Matrix::kX, false, "x/fprop"},
                                                                {Matrix::kW, false, "w/fprop"},
                                                                {Matrix::kG, false, "g/dgrad"},
                                                                {Matrix::kW, true, "w/dgrad"},
                                                                {Matrix::kG, true, "g/wgrad"},
                                                                {Matrix::kX, true, "x/wgrad"}}};

// A recipe and the texts that its ops take, parsed once a process.
struct PreparedRecipe {
  Recipe recipe;
  std::string text, fprop, dgrad, wgrad;
  std::array<Spec, kPlaces> specs;
  std::array<std::string, kPlaces> spec_texts;  // "" for bf16, which no cast reads
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

// An amax of this step, for one row of a history, or two of the same amax.
struct PendingAmax {
  Tensor history;
  Place first, last;
  Tensor amax;
};
// Those of a forward pass, which are written once nothing of it can fail any more.
using PendingAmaxes = std::vector<PendingAmax>;
// Raises this step's amaxes in the histories to them.
void record(const PendingAmaxes& pending);

// What the operands of one module depend on besides their values.
struct ModuleState {
  Tensor rng;                          // undefined: nothing is stochastic
  std::int64_t stream = 0;             // of the module, beside the one that rng may hold
  Tensor history;                      // undefined: nothing is delayed
  PendingAmaxes* pending = nullptr;    // null: amaxes go to the history at once
  const Sharding* sharding = nullptr;  // null: this process has the whole weight
};

// Writes this step's amaxes of delayed operands to the history. is_cut: whether they are a shard's
void record_amaxes(const PreparedRecipe& recipe, const Wanted& row, const Wanted& col,
                   const ModuleState& state, const Directions& found, bool is_cut);

// Both directions of x (rows, cols) from one read; bf16 directions are x itself and its transposed
// view. A shard gets the bytes that the whole has there, by its origin and by amaxes of all ranks.
Directions quantize_both(const PreparedRecipe& recipe, const Tensor& x, const Wanted& row,
                         const Wanted& col, const ModuleState& state);

// Both directions of x where a caller has them, as the op layer_operands returns them. rows: of x
// as products read it
Directions prequantized_both(const PreparedRecipe& recipe, const char* name, at::TensorList tensors,
                             const Tensor& x, const SymInt& rows, const Wanted& row,
                             const Wanted& col);

// Requires an amax history, float32 (kPlaces, 1 + length) in memory of its own, on the device of x.
void check_history(const char* op, const Tensor& history, const Tensor& x);

// Requires shards that hold whole blocks, transforms and random words. length: of the dimension of
// W that is cut
void check_shards(const PreparedRecipe& recipe, const Sharding& sharding, const SymInt& length);

// What a rank's run of tokens must be a multiple of, so that codes of x can be gathered; 0: they
// cannot.
std::int64_t token_unit(const PreparedRecipe& recipe);

// Requires tokens of x whose codes can be gathered.
void check_tokens(const PreparedRecipe& recipe, const Sharding& sharding, const Tensor& x);

// Returns what a product multiplies of a direction of quantize_both: the decoded values where they
// were asked for, else the codes.
ProductInput product_input(const PreparedRecipe& recipe, const QuantizedOperand& operand,
                           const Wanted& wanted);

// Returns the same of a direction of prequantized_both, whose codes are in a form that
// layer_operands chose.
ProductInput prequantized_input(const PreparedRecipe& recipe, const QuantizedOperand& operand,
                                const Wanted& wanted);

// x (…, K) as (M, K). name: for errors
Tensor as_matrix(const Tensor& x, const char* name = "x");

}  // namespace minifloat::torch_ops
