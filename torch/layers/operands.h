// The six operands of a layer's three products: one table of them, the casts of both directions of
// a matrix from one read, what a cast depends on besides values, and the checks of shards.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "layers/amax_histories.h"
#include "layers/sharding.h"
#include "minifloat/recipe.h"
#include "ops/history.h"
#include "ops/ops.h"
#include "products/products.h"

namespace minifloat::torch_ops {

struct OperandInfo {
  Matrix matrix;
  bool columnwise;   // whether the product reads the transpose
  const char* name;  // also of the random stream in the module
  bool is_second;    // of its product
};
inline constexpr std::array<OperandInfo, kPlaces> kOperands = {
    {{Matrix::kX, false, "x/fprop", false},
     {Matrix::kW, false, "w/fprop", true},
     {Matrix::kG, false, "g/dgrad", false},
     {Matrix::kW, true, "w/dgrad", true},
     {Matrix::kG, true, "g/wgrad", false},
     {Matrix::kX, true, "x/wgrad", true}}};

// A recipe and the texts that its ops take, parsed once in a process.
struct PreparedRecipe {
  Recipe recipe;
  std::string text, fprop, dgrad, wgrad;
  std::array<Spec, kPlaces> specs;
  std::array<std::string, kPlaces> spec_texts;  // "" for bf16, which no cast reads
  bool is_stochastic, is_delayed;

  // Returns the place of the codes that an operand is read from: its own, or where backward reads
  // the values of fprop's codes that of fprop.
  Place place_of_codes(Place place) const {
    if (!specs[place].is_of_forward()) return place;
    return place == kDgradW ? kFpropW : kFpropX;
  }
  const Spec& spec_of_codes(Place place) const { return specs[place_of_codes(place)]; }
  // Returns whether an operand is the matrix itself, in high precision.
  bool reads_values(Place place) const { return spec_of_codes(place).is_bf16(); }
  // Returns whether backward reads the codes of an operand of fprop too.
  bool keeps_codes(Place place) const {
    return (place == kFpropW && specs[kDgradW].is_of_forward()) ||
           (place == kFpropX && specs[kWgradX].is_of_forward());
  }
};
const PreparedRecipe& prepare(const std::string& text);

// One operand of one product, and how a pass uses it.
struct OperandUse {
  Place place;
  bool is_needed = true;
  bool decoded = false;  // as values, for an exact product that follows and alone reads it
  bool given = false;    // whether the caller cast it: its codes have the form of layer_operands
  // Whether x is cast in backward, right before wgrad, instead of being saved by forward.
  bool recomputed = false;
};

// What a cast of one layer's operand depends on besides its values.
struct CastContext {
  Tensor rng;                           // undefined: nothing is stochastic
  std::int64_t stream = 0;              // of the module, besides a stream in rng
  Tensor history;                       // undefined: nothing is delayed
  at::TensorList other_histories = {};  // that one cast raises too: of other layers that read x
  CurrentAmaxes* deferred_amaxes =
      nullptr;                         // takes the amaxes instead of the histories; see linear.cpp
  bool returns_amaxes = false;         // as outputs of the cast as well, under delayed scaling too
  const Sharding* sharding = nullptr;  // null: this process has the whole weight
  // The amax of the columnwise operand under a scale that is not delayed; none: it is computed.
  std::optional<Tensor> amax = {};
  std::optional<Tensor> amax_of_rowwise = {};  // of the rowwise operand, in the same way
  bool apart_col = false;  // whether an op returns the columnwise operand, as in QuantizeOptions
  bool swizzled_apart = false;  // whether its scales are swizzled
  bool is_raised = false;       // whether the history has the amaxes of delayed operands already
  // Whether the other direction is cast in backward. Its operand then has the amax that this later
  // cast takes, where one read or one exchange among ranks finds both, and nothing else.
  bool casts_other_later = false;
  // Of experts: the groups of x and g, whose unit is that of wgrad's columns, and the numbers of
  // their rows and of the first group or matrix.
  Groups groups = {};
  std::optional<Tensor> row_ids = {};
  std::int64_t first_expert = 0;
  // The weight's features (N, K) of a layer whose operands this process has whole; none: not known.
  // A cast may then write operands in the form that their product reads.
  std::optional<std::array<SymInt, 2>> features = {};
  // Quantizes values that a kernel computes, of the shape of x; empty: those of x are quantized.
  std::function<Directions(const std::string& row, const std::string& col, const QuantizeOptions&)>
      cast = {};
};

// Raises the histories to the current amaxes of delayed operands that a cast returned, or a caller
// gave. is_cut: whether of a shard
void raise_histories(const PreparedRecipe& recipe, const OperandUse& row, const OperandUse& col,
                     const CastContext& state, const Directions& found, bool is_cut);

// The specs of a cast of both directions, "" for one that is not cast, and its options. The recipe
// must outlive it. FP4 is written as FP8 where one product alone reads the operand, right after the
// cast, and as FP8; scales are swizzled where products alone read them, and swizzled.
struct CastPlan {
  const std::string &row, &col;
  QuantizeOptions options;
};
CastPlan plan_cast(const PreparedRecipe& recipe, const Tensor& x, const OperandUse& row,
                   const OperandUse& col, const CastContext& state);

// Quantizes both directions of x (rows, cols) by one cast, as plan_cast plans. bf16 directions
// are x itself and its transposed view. A columnwise one whose values are those of fprop's codes
// has the rowwise codes; see values_of_forward. A shard's bytes are the whole's at that place: the
// cast takes the shard's origin and the amaxes of all ranks. The current amaxes of delayed operands
// are in the histories when it returns.
Directions quantize_both(const PreparedRecipe& recipe, const Tensor& x, const OperandUse& row,
                         const OperandUse& col, const CastContext& state);

// Returns whether a scale's amax is one of values as they are, of this call.
inline bool has_amax_of_values(const Spec& spec) {
  return spec.has_tensor_amax() && !spec.delayed && spec.transform == 0;
}

// Returns the amax that both directions of an operand have under one scale of the tensor, of each
// expert's matrix or of each group: a copy of the rowwise one, which shares the codes' memory.
// Undefined: each direction has an amax of its own, or one of a history.
Tensor amax_of_both(const PreparedRecipe& recipe, Place row, Place col, const Tensor& amax);

// Returns whether a rowwise cast also finds the amaxes of the columns, by which the columnwise one
// scales.
inline bool finds_amaxes_of_columns(const Spec& row, const Spec& col) {
  return row.has_row_amax() && col.has_row_amax() && row.transform == 0 && col.transform == 0;
}

// Returns whether the amax of a delayed operand that is cast rowwise is also that of the columnwise
// one, for the history.
inline bool has_amax_of_history(const Spec& row, const Spec& col) {
  return row.delayed && col.delayed && row.transform == 0 && col.transform == 0;
}

// Returns both directions of x from a caller's tensors, as the op layer_operands returns them.
// x: a matrix, or one for each expert.   rows: of x as products read x.   parts: the number of its
// tensor amaxes.   op, name: for errors
Directions prequantized_both(const PreparedRecipe& recipe, const char* op, const char* name,
                             at::TensorList tensors, const Tensor& x, const SymInt& rows,
                             const OperandUse& row, const OperandUse& col, const SymInt& parts = 1);

// Requires an amax history, float32 (kPlaces, 1 + length) without overlap, on the device of x.
// experts: none, or (kPlaces, experts, 1 + length)
void check_history(const char* op, const Tensor& history, const Tensor& x,
                   const std::optional<SymInt>& experts = std::nullopt);

// Requires shards that hold whole blocks, transforms and groups of random bits. length: of each of
// the parts of W on a rank, along the dimension that is cut
void check_shards(const char* op, const PreparedRecipe& recipe, const Sharding& sharding,
                  const SymInt& length);

// Returns the number that a rank's run of tokens must be a multiple of, so that codes of x can be
// gathered; 0: no codes can be.
std::int64_t token_unit(const PreparedRecipe& recipe);
// Returns the number that a shard's length along a dimension of W, x or g must be a multiple of.
std::int64_t shard_multiple(const Spec& spec, bool columnwise, int dim);

// Requires tokens of x whose codes can be gathered.
void check_tokens(const PreparedRecipe& recipe, const Sharding& sharding, const Tensor& x);

// Returns the input of a product from a direction of quantize_both or prequantized_both: the
// decoded values where the product needs them, else the codes.
ProductInput product_input(const PreparedRecipe& recipe, const QuantizedOperand& operand,
                           const OperandUse& needed);

// Returns the operand of a product of backward that reads the values of fprop's codes: decoded,
// rounded to dtype, and transposed.   operand: the rowwise codes; cols: of the matrix; table: of
// the groups of x, or none
Values values_of_forward(const PreparedRecipe& recipe, Place place, const QuantizedOperand& operand,
                         const SymInt& cols, at::ScalarType dtype,
                         const std::optional<Tensor>& table = std::nullopt);

// Returns the values of rowwise codes (…, M, cols) in the matrix's own basis, rounded to dtype.
Tensor values_of_codes(const Spec& spec, const QuantizedOperand& rows, const SymInt& cols,
                       const std::optional<Tensor>& table, at::ScalarType dtype);

// Returns the unit of the columns of wgrad's operands in groups. Under bf16 alone it is not read.
inline std::int64_t wgrad_unit(const PreparedRecipe& recipe) {
  return std::max(recipe.specs[kWgradG].group_unit(), recipe.specs[kWgradX].group_unit());
}

// Returns a view of the tensor, or an empty list. `t` must outlive the list.
inline at::TensorList list_of(const std::optional<Tensor>& t) {
  return t ? at::TensorList(*t) : at::TensorList();
}

// Returns x (…, K) as (M, K). op, name: for errors
Tensor as_matrix(const char* op, const char* name, const Tensor& x);

}  // namespace minifloat::torch_ops
