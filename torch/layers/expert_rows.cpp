#include "layers/expert_rows.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <utility>

#include "layers/layer_operands.h"
#include "ops/checks.h"
#include "ops/direct.h"
#include "ops/experts.h"

namespace minifloat {
namespace torch_ops {
namespace {

// Returns whether one cast of x may be read by several products.
bool is_shared(const Spec& spec) {
  return !spec.is_bf16() && !spec.stochastic && !spec.delayed && !spec.has_blocks_2d();
}

// Quantizes tokens rowwise, in the form that products of experts read.
std::vector<Tensor> cast_of_tokens(const PreparedRecipe& recipe, const Tensor& x) {
  const SymInt count = x.sym_size(0);
  const Tensor ends = at::full_symint({1}, c10::Scalar(count), x.options().dtype(at::kInt));
  return operands_of_rows(recipe, x, true, false,
                          {.table = group_table("group_table", ends, count)});
}

// Returns the rowwise tensors of a linear layer's operand as products of experts read them; none:
// they cannot. The engine of experts may multiply values where the linear layer's multiplies codes.
std::vector<Tensor> as_experts_read(const PreparedRecipe& recipe, const Tensor& x,
                                    at::TensorList tokens) {
  const bool has_values = tokens[3].dim() > 1;
  const PlannedProduct fprop = plan_product(recipe.recipe.fprop, recipe.fprop, x.device(), true);
  if (has_values == (fprop.reads_values() && !recipe.keeps_codes(kFpropX)))
    return tokens.slice(0, 4).vec();
  // FP4 codes as FP8 are not those of a cast, and values alone have no codes.
  if (tokens[0].dim() < 2 || tokens[0].scalar_type() != at::kByte) return {};
  return {tokens[0], tokens[1], tokens[2],
          decode(tokens[0], tokens[1], recipe.specs[kFpropX], x.sym_size(1))};
}

// Quantizes each token once, and copies its codes to its rows.
std::vector<Tensor> operands_of_tokens(const PreparedRecipe& recipe, const Tensor& x,
                                       const RowOrder& order, at::TensorList tokens) {
  std::vector<Tensor> row;
  if (!tokens.empty()) row = as_experts_read(recipe, x, tokens);
  if (row.empty()) row = cast_of_tokens(recipe, x);
  Tensor& elements = row[3].dim() > 1 ? row[3] : row[0];  // an exact product reads no codes
  elements = order.take(elements);
  row[1] = order.take(row[1]);
  if (recipe.specs[kFpropX].has_row_amax()) row[2] = order.take(row[2]);
  row.resize(4);
  row.resize(8, at::empty({0}, x.options().dtype(at::kFloat)));
  return row;
}

// Returns whether all products of x can read one cast of x.
bool read_one_cast(const std::vector<const PreparedRecipe*>& recipes, Place place) {
  bool is_one = is_shared(recipes[0]->spec_of_codes(place));
  for (const PreparedRecipe* other : recipes) is_one &= other->text == recipes[0]->text;
  return is_one;
}

}  // namespace

Tensor RowOrder::tokens() const { return pairs.floor_divide(c10::Scalar(slots())); }

Tensor RowOrder::table() const { return group_table("group_table", offs, rows()); }

Tensor RowOrder::take(const Tensor& x) const { return take_rows(x, pairs, slots(), places); }

Tensor shape_alone(const Tensor& like, const SymInt& rows, const SymInt& cols) {
  return like.new_empty({1, 1}).expand_symint({rows, cols});
}

Rows rows_of_tokens(const std::vector<const PreparedRecipe*>& recipes, const Tensor& x,
                    const RowOrder& order, const Tensor& table, bool rowwise, at::TensorList tokens,
                    const Tensor& amax) {
  const PreparedRecipe& recipe = *recipes[0];
  if (!read_one_cast(recipes, rowwise ? kFpropX : kWgradX)) return {order.take(x), {}};
  const Tensor shape = shape_alone(x, order.rows(), x.sym_size(1));
  if (rowwise && recipe.specs[kFpropX].casts_rows_alone())
    return {shape, operands_of_tokens(recipe, x, order, tokens)};
  return {shape, operands_of_rows(recipe, x, rowwise, !rowwise,
                                  {.table = table, .rows_from = order.tokens()}, amax)};
}

Rows columnwise_rows(const std::vector<const PreparedRecipe*>& recipes, const Tensor& rows,
                     const Tensor& table) {
  if (!read_one_cast(recipes, kWgradX)) return {rows, {}};
  return {shape_alone(rows, rows.sym_size(0), rows.sym_size(1)),
          operands_of_rows(*recipes[0], rows, false, true, {.table = table})};
}

// ---- Rows that ranks send as codes --------------------------------------------------------------
QuantizedOperand sort_codes(const Spec& spec, at::TensorList arrived, const RowOrder& order) {
  TORCH_CHECK_VALUE(arrived.size() == 3, "grouped_mlp: expected codes, scale and amax, got ",
                    arrived.size(), " tensors");
  QuantizedOperand rows = {order.take(arrived[0]), arrived[1], arrived[2], Tensor()};
  if (spec.has_blocks() || spec.has_row_amax()) rows.scale = order.take(rows.scale);
  if (spec.has_outer_row_amax())
    rows.amax = order.take(rows.amax).reshape(-1);
  else if (spec.has_row_amax())
    rows.scale = rows.scale.reshape(-1);
  return rows;
}

std::vector<Tensor> as_operands(const QuantizedOperand& rowwise) {
  std::vector<Tensor> tensors = {rowwise.codes, rowwise.scale, rowwise.amax};
  tensors.resize(8, at::empty({0}, rowwise.codes.options().dtype(at::kFloat)));
  return tensors;
}

Tensor values_of(const Spec& spec, const QuantizedOperand& rows, const SymInt& cols,
                 const Tensor& table, at::ScalarType dtype) {
  return to_dtype(values_of_codes(spec, rows, cols, table, at::kBFloat16), dtype);
}

void GradientCodes::set(std::vector<Tensor> arrived) {
  for (const Tensor& t : arrived) bridge::check_memory_if_real("GradientCodes", "tensors", t);
  const std::lock_guard lock(mutex_);
  arrived_ = std::move(arrived);
}

std::vector<Tensor> GradientCodes::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(arrived_, {});
}

void register_gradient_codes() {
  static const auto registered =
      torch::class_<GradientCodes>("minifloat", "GradientCodes")
          .def(torch::init<>())
          .def("set", [](const c10::intrusive_ptr<GradientCodes>& self,
                         std::vector<Tensor> arrived) { self->set(std::move(arrived)); });
  static_cast<void>(registered);
}

}  // namespace torch_ops

}  // namespace minifloat
