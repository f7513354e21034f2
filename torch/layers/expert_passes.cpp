// Both passes of the experts' products, from values, from codes that ranks sent, or from tokens
// that were cast once for all slots:
//
//     forward    rows of x rowwise · Wᵀ         gate and up are saved, and x once for all slots
//                h rowwise, as it is computed
//     backward   dh = g · W2
//                d_gate, d_up, d_weights        from dh, gate and up
//                d_rows                         by dgrad of gate and up
//                dx = the sum of a token's d_rows
//                dW                             the rows of x are read again, columnwise
//                dW2 = gᵀ · h                   h is computed again, columnwise; right after dh
//                                               where g's operand is larger than dW2
#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <utility>

#include "layers/grouped_mlp.h"
#include "layers/layer_operands.h"
#include "ops/direct.h"
#include "ops/experts.h"

namespace minifloat::torch_ops {
namespace {

std::vector<const PreparedRecipe*> recipes_of_inputs(const Experts& experts) {
  std::vector<const PreparedRecipe*> recipes;
  for (std::size_t i = 0; i < experts.inputs(); ++i) recipes.push_back(experts.products[i].recipe);
  return recipes;
}

// Returns h as the output's product reads it, rowwise or columnwise.
//   keeps_amax: whether the rowwise cast also finds the amax of the columnwise one, of its groups;
//   amax: that one; undefined: the cast finds it
Rows quantize_hidden(const Experts& experts, const RowOrder& order, const GateAndUp& gates,
                     bool columnwise, bool keeps_amax, const Tensor& amax = {}) {
  const bool rowwise = !columnwise;
  const ExpertProduct& output = experts.products.back();
  const PreparedRecipe& recipe = *output.recipe;
  const ActivationArguments of = gates.of(experts.form);
  const auto reads_values = [&](Place place) {
    return recipe.specs[place].is_bf16() || recipe.specs[place].has_blocks_2d();  // also fprop.x
  };
  // The product refuses 2D blocks.
  if ((rowwise && reads_values(kFpropX)) || (columnwise && reads_values(kWgradX)))
    return {activation(of), {}};
  CastContext state;
  if (!output.rng.empty()) state.rng = output.rng[0];
  if (!output.history.empty()) state.history = output.history[0];
  state.stream = output.stream;
  state.row_ids = order.row_ids;
  state.first_expert = output.first_expert;
  state.casts_other_later = keeps_amax;
  if (amax.defined()) state.amax = amax;
  return {shape_alone(of.gate, of.rows(), of.width()),
          operands_of_swiglu(of, recipe, rowwise, columnwise, std::move(state))};
}

QuantizedOperand codes_of(const ExpertTensors& t) {
  return {t.codes[0], t.codes[1], t.codes[2], Tensor()};
}

// Returns the amax that both directions of rows share; undefined: they share none.
Tensor amax_of_rows(const PreparedRecipe& recipe, const Rows& rowwise) {
  return rowwise.operands.empty() ? Tensor()
                                  : amax_of_both(recipe, kFpropX, kWgradX, rowwise.operands[2]);
}

// Returns the rows of x, quantized columnwise once for all products.   amax: as rows_of_tokens
Rows rows_again(const Experts& experts, const ExpertTensors& t, const Tensor& table,
                const Tensor& amax) {
  const std::vector<const PreparedRecipe*> recipes = recipes_of_inputs(experts);
  if (t.codes.empty())
    return rows_of_tokens(recipes, t.x, t.order, table, /*rowwise=*/false, {}, amax);
  if (recipes[0]->specs[kWgradX].is_of_forward()) {
    std::vector<Tensor> operands = as_operands(codes_of(t));
    std::rotate(operands.begin(), operands.begin() + 4, operands.end());  // the columnwise ones
    return {t.x, std::move(operands)};
  }
  const Tensor values =
      values_of(recipes[0]->specs[kFpropX], codes_of(t), t.x.sym_size(1), table, t.x.scalar_type());
  return columnwise_rows(recipes, values, table);
}

// The gradient of rows: values, and codes that dgrad reads instead, or none.
struct RowGradient {
  Tensor values;
  std::vector<Tensor> operands;
  std::optional<Tensor> rows_from;
};

// Returns the gradient of rows from that of the result. Of sums: the tokens' and the token of each
// row where casts read that, else a copy for each row.
RowGradient gradient_of_rows(const Experts& experts, const RowOrder& order, const Tensor& table,
                             const Tensor& g) {
  const PreparedRecipe& recipe = *experts.products.back().recipe;
  if (experts.gradient) {
    const Spec& spec = recipe.specs[kDgradG];
    const QuantizedOperand rows = sort_codes(spec, experts.gradient->take(), order);
    return {values_of(spec, rows, g.sym_size(1), table, g.scalar_type()), as_operands(rows), {}};
  }
  if (!experts.sums) return {g, {}, {}};
  if (recipe.specs[kDgradG].is_bf16() || recipe.specs[kWgradG].is_bf16())
    return {order.take(g), {}, {}};
  return {g, {}, order.tokens()};
}

at::TensorList bias_of(const Experts& experts, const std::vector<Tensor>& biases, std::size_t i) {
  const int index = experts.bias_index[i];
  return index < 0 ? at::TensorList() : at::TensorList(biases[static_cast<std::size_t>(index)]);
}

// Computes the gradients of the input products, of x and of the weights.   dh: of h, which is freed
void backward_inputs(const Experts& experts, const ExpertTensors& t, const ExpertResults& found,
                     Tensor dh, const GateAndUp& gates, const Tensor& table,
                     const ExpertNeeds& needs, ExpertGradients& out) {
  const std::size_t inputs = experts.inputs();
  bool finds_amaxes = needs.x;  // where both casts of a gradient read it
  for (std::size_t i = 0; i < inputs; ++i)
    finds_amaxes &= needs.matrices[i] && takes_gradient_amaxes(*experts.products[i].recipe);
  auto [d_product, d_other, d_weights, amaxes] =
      activation_backward(dh, gates.of(experts.form), finds_amaxes);
  dh.reset();
  out.weights = to_dtype(d_weights, t.weights.scalar_type());

  std::array<Tensor, 2> of_inputs = {std::move(d_product), std::move(d_other)};
  const Tensor shape_of_rows = shape_alone(t.x, t.order.rows(), t.x.sym_size(1));
  Tensor d_rows;
  Rows rows;  // cast once for all products
  for (std::size_t i = 0; i < inputs; ++i) {
    const int bias = experts.bias_index[i];
    const bool needs_bias = bias >= 0 && needs.biases[static_cast<std::size_t>(bias)];
    const auto take = [&](Tensor da) {
      if (da.defined()) d_rows = d_rows.defined() ? d_rows + da : std::move(da);
      if (i + 1 == inputs && d_rows.defined())
        out.x = add_slots(std::exchange(d_rows, {}), t.order.places, std::nullopt);
      if (needs.matrices[i] && !rows.values.defined())
        rows = rows_again(experts, t, table, found.amaxes.rows);
      return i + 1 == inputs ? std::exchange(rows, {}) : rows;
    };
    GroupedCall call = product_call(experts.products[i], t.x.scalar_type(), t.order, table,
                                    bias_of(experts, t.biases, i));
    call.amax = found.amaxes.matrices[i];
    if (finds_amaxes)
      call.g_amax_of_rows = amaxes[2 * i], call.g_amax_of_columns = amaxes[2 * i + 1];
    GroupedGradients d =
        group_gradients(std::move(of_inputs[i]), shape_of_rows, t.matrices[i], t.order.offs, call,
                        {needs.x, needs.matrices[i], needs_bias}, std::nullopt, take);
    out.matrices[i] = std::move(d.b);
    if (needs_bias) out.biases[static_cast<std::size_t>(bias)] = std::move(d.bias);
  }
}

// Returns whether the output's matrices get their gradients after those of the inputs: where it
// takes less memory to keep the operand of g meanwhile.
bool is_output_last(const Experts& experts, const ExpertTensors& t, const Tensor& g) {
  const PreparedRecipe& recipe = *experts.products.back().recipe;
  const bool has_values =
      recipe.specs[kWgradG].is_bf16() ||
      plan_product(recipe.recipe.wgrad, recipe.wgrad, g.device(), /*is_grouped=*/true)
          .reads_values();
  const SymInt bits =
      t.order.rows() * g.sym_size(1) * (has_values ? 16 : recipe.specs[kWgradG].code_bits());
  const Tensor& matrices = t.matrices.back();
  return bits < matrices.sym_numel() * SymInt(8 * matrices.element_size());
}

}  // namespace

bool ExpertNeeds::any() const {
  bool found = x || weights || base;
  for (const bool need : matrices) found |= need;
  for (const bool need : biases) found |= need;
  return found;
}

bool ExpertNeeds::hidden() const {
  ExpertNeeds before = *this;
  before.base = before.matrices.back() = false;
  return before.any();
}

GroupedCall product_call(const ExpertProduct& product, at::ScalarType dtype, const RowOrder& order,
                         const Tensor& table, at::TensorList bias, at::TensorList a_operands,
                         bool zeroes_tail) {
  return {.recipe = *product.recipe,
          .out_dtype = dtype,
          .stream = product.stream,
          .first_expert = product.first_expert,
          .zeroes_tail = zeroes_tail,
          .bias = bias,
          .rng = product.rng,
          .row_ids = at::TensorList(order.row_ids),
          .history = product.history,
          .a_operands = a_operands,
          .weight_operands = product.weight_operands,
          .recomputes_weights = product.recomputes_weights,
          .sharding = product.sharding,
          .table = table};
}

Tensor forward_rows(const Experts& experts, const ExpertTensors& t, const ExpertNeeds* needs,
                    ExpertResults& found) {
  const Tensor table = t.order.table();
  const at::ScalarType dtype = t.x.scalar_type();
  const Rows rows = t.codes.empty()
                        ? rows_of_tokens(recipes_of_inputs(experts), t.x, t.order, table,
                                         /*rowwise=*/true, t.tokens)
                        : Rows{t.x, as_operands(codes_of(t))};
  found.amaxes.matrices.resize(experts.products.size());
  const auto multiply = [&](const Rows& a, std::size_t i, at::TensorList bias, bool zeroes_tail) {
    GroupedCall call =
        product_call(experts.products[i], dtype, t.order, table, bias, a.operands, zeroes_tail);
    // Only what backward reads: a forward that is repeated may have read rowwise codes alone.
    const bool has_dgrad = needs && (i < experts.inputs() ? needs->x : needs->hidden());
    if (has_dgrad) call.keeps_amax = &found.amaxes.matrices[i];
    return multiply_groups(a.values, t.matrices[i], t.order.offs, call);
  };
  if (needs && t.codes.empty()) found.amaxes.rows = amax_of_rows(*experts.products[0].recipe, rows);
  for (std::size_t i = 0; i < experts.inputs(); ++i)
    found.products.push_back(
        multiply(rows, i, bias_of(experts, t.biases, i), /*zeroes_tail=*/false));
  const GateAndUp gates(found.products, t.weights, t.order, table);
  const Rows h = quantize_hidden(experts, t.order, gates, /*columnwise=*/false, needs != nullptr);
  if (needs && !h.operands.empty() && h.operands[6].numel() > 0)
    found.amaxes.hidden = h.operands[6];
  return multiply(h, experts.inputs(), {}, /*zeroes_tail=*/true);
}

ExpertGradients backward_rows(const Experts& experts, const ExpertTensors& t,
                              const ExpertResults& found, const Tensor& g,
                              const ExpertNeeds& needs) {
  const std::size_t output = experts.inputs();
  ExpertGradients out;
  out.matrices.resize(output + 1);
  out.biases.resize(t.biases.size());
  const Tensor table = t.order.table();
  const GateAndUp gates(found.products, t.weights, t.order, table);
  RowGradient of_rows = gradient_of_rows(experts, t.order, table, g);
  GroupedCall call = product_call(experts.products[output], t.x.scalar_type(), t.order, table, {},
                                  {}, /*zeroes_tail=*/false);
  call.g_operands = of_rows.operands;
  call.amax = found.amaxes.matrices[output];
  const Tensor shape_of_hidden = shape_alone(t.x, t.order.rows(), t.matrices[output].sym_size(1));
  const bool is_last = is_output_last(experts, t, g);
  Tensor dh;
  const auto take = [&](Tensor da) {
    for (Tensor& codes : of_rows.operands) codes.reset();  // dgrad has read them
    if (is_last && da.defined())
      backward_inputs(experts, t, found, std::move(da), gates, table, needs, out);
    else
      dh = std::move(da);
    return needs.matrices[output]
               ? quantize_hidden(experts, t.order, gates, true, false, found.amaxes.hidden)
               : Rows();
  };
  GroupedGradients d = group_gradients(
      std::move(of_rows.values), shape_of_hidden, t.matrices[output], t.order.offs, call,
      {needs.hidden(), needs.matrices[output], false}, of_rows.rows_from, take);
  out.matrices[output] = std::move(d.b);
  if (dh.defined()) backward_inputs(experts, t, found, std::move(dh), gates, table, needs, out);
  return out;
}

}  // namespace minifloat::torch_ops
