// The order of the rows of experts, and the operand of x that their first products read: codes that
// ranks sent, or tokens quantized once for all slots.
//
//     a scale a row or a block    codes of tokens, copied to their rows
//     elsewhere                   codes of rows, which the cast reads through an index
//     stochastic or delayed       each product quantizes a copy of the rows itself
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <mutex>
#include <utility>
#include <vector>

#include "layers/grouped_call.h"
#include "layers/operands.h"

namespace minifloat::torch_ops {

// Where the rows come from: of T tokens with k slots, M = T * k rows by E experts.
struct RowOrder {
  Tensor pairs;    // int32 (M): the pair of token and slot of each row, token * k + slot
  Tensor places;   // int32 (T, k): the row of each pair
  Tensor offs;     // int32 (E): the end of each expert's rows
  Tensor row_ids;  // int32 (M): which random bits each row draws

  SymInt rows() const { return pairs.sym_size(0); }
  SymInt slots() const { return places.sym_size(1).max(1); }  // 1 where there are none
  Tensor tokens() const;                                      // int32 (M): the token of each row
  Tensor table() const;                                       // of the experts' groups
  // Returns the token of each row, (T, …) -> (M, …).
  Tensor take(const Tensor& x) const;
};

// Returns the rows of x (T, D) for products of these recipes, quantized in one direction without a
// copy of the values where all can read one operand.
//   tokens: x as the op layer_operands returns it, of which the rowwise tensors are read; or none
//   amax: of the columnwise operand's groups; undefined: the cast finds it
Rows rows_of_tokens(const std::vector<const PreparedRecipe*>& recipes, const Tensor& x,
                    const RowOrder& order, const Tensor& table, bool rowwise,
                    at::TensorList tokens = {}, const Tensor& amax = {});

// Returns rows that are copied already, quantized columnwise once for all products that can read
// one operand.
Rows columnwise_rows(const std::vector<const PreparedRecipe*>& recipes, const Tensor& rows,
                     const Tensor& table);

// Returns a tensor of a shape (M, cols), dtype and device of `like`, without memory for its values.
Tensor shape_alone(const Tensor& like, const SymInt& rows, const SymInt& cols);

// ---- Rows that ranks send as codes --------------------------------------------------------------
// Sorts rows by expert. arrived: rows in the order of arrival, each of which is a token with one
// slot here: codes, their scales where rows or blocks have some, else those of experts, and the
// experts' amaxes.
QuantizedOperand sort_codes(const Spec& spec, at::TensorList arrived, const RowOrder& order);

// Returns an operand as the op scaled_grouped_mm takes the rowwise one of eight tensors.
std::vector<Tensor> as_operands(const QuantizedOperand& rowwise);

// Returns the values of sorted rows, (M, cols), rounded to bf16, in a dtype.
Tensor values_of(const Spec& spec, const QuantizedOperand& rows, const SymInt& cols,
                 const Tensor& table, at::ScalarType dtype);

// The gradient of a result that reaches backward as codes: autograd carries a tensor of its shape
// alone. Python's Combine.backward sets the codes before it returns that tensor, and backward_rows
// (expert_passes.cpp) takes them.
class GradientCodes : public torch::CustomClassHolder {
 public:
  // arrived: as sort_codes takes it. Throws ValueError for a tensor outside its memory.
  void set(std::vector<Tensor> arrived);
  // Returns the tensors, and forgets them.
  std::vector<Tensor> take();

 private:
  std::vector<Tensor> arrived_;
  std::mutex mutex_;
};

// Registers the class, once; see register_gathered_input.
void register_gradient_codes();

}  // namespace minifloat::torch_ops
