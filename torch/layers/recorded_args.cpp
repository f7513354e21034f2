#include "layers/recorded_args.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "minifloat/group_checks.h"
#include "ops/bridge.h"
#include "ops/tracing.h"

namespace minifloat::torch_ops {
namespace {

bool records_recipe(const PreparedRecipe& recipe) {
  // Else what backward reads of W is W itself, or what forward reads.
  return !recipe.reads_values(kFpropX) && !recipe.reads_values(kFpropW) &&
         !recipe.reads_values(kDgradW) && !recipe.keeps_codes(kFpropW);
}

// Requires an operand as a product reads it.   operand: three tensors; rows: none: any
void check_operand(const char* op, const char* name, const Spec& spec, at::TensorList operand,
                   const std::optional<SymInt>& rows, const InputSizes& sizes,
                   bool is_decoded = false) {
  const Tensor &elements = operand[0], &scale = operand[1], &amax = operand[2];
  TORCH_CHECK_VALUE(elements.defined() && scale.defined() && amax.defined(), op, ": expected ",
                    name, " as three tensors, got none");
  check_input(name, spec, input_of(spec, elements, scale, amax), sizes);
  const at::ScalarType dtype = elements.scalar_type();
  TORCH_CHECK_VALUE(
      spec.is_bf16() || (elements.is_contiguous() && scale.is_contiguous() &&
                         (dtype == at::kByte || is_decoded || dtype == at::kFloat8_e4m3fn)),
      op, ": expected contiguous ", name, " as a cast returns it, got ", dtype, ", strides ",
      elements.sym_strides(), ", and a scale of ", scale.sym_strides());
  const SymInt parts = sizes.matrices.value_or(sizes.groups.value_or(SymInt(1)));
  TORCH_CHECK_VALUE(!spec.has_tensor_amax() || amax.sym_numel() == 0 || amax.sym_numel() == parts,
                    op, ": expected ", name, " with ", parts, " amaxes, got ", amax.sym_sizes());
  TORCH_CHECK_VALUE(!rows || elements.sym_size(-2) == *rows, op, ": expected ", name, " of ",
                    rows.value_or(0), " rows, got ", elements.sym_size(-2));
}

}  // namespace

Tensor empty_result(const Tensor& like, c10::SymIntArrayRef shape, at::ScalarType dtype) {
  return at::empty_symint(shape, like.options().dtype(dtype));
}

bool records_forward(const PreparedRecipe& recipe, const Layers& layers, const Tensor& t) {
  const bool is_cast =
      layers.prequantized.weight.empty() && (!layers.groups || layers.prequantized.x.empty());
  return is_compiled(t) && !layers.shards.sharding && is_cast && records_recipe(recipe);
}

bool records_backward(const SavedLayers& layers, const std::vector<Tensor>& grads) {
  const auto is_recorded = [](const Tensor& g) { return !g.defined() || is_compiled(g); };
  return std::all_of(grads.begin(), grads.end(), is_recorded) && !layers.sharding &&
         !layers.accumulation.is_on();
}

bool saves_weight_itself(const ForwardPass& pass) {
  return pass.layers.recomputes_weights && pass.saved && pass.needs.dx;
}

bool returns_swizzled(const ForwardPass& pass, std::size_t i) {
  if (pass.layers.groups) return false;
  const bool is_cast = pass.saved && pass.needs.dx && !saves_weight_itself(pass);
  return plan_cast(pass.prepared, pass.layers.weights[i], {kFpropW, false}, {kDgradW, is_cast},
                   pass.state_of(i))
      .options.swizzled_col;
}

void check_recipe(const char* op, const PreparedRecipe& recipe) {
  TORCH_CHECK_VALUE(records_recipe(recipe), op, ": expected a recipe whose forward reads codes, ",
                    "and dgrad codes of its own, got ", recipe.text);
}

void check_state(const char* op, const PreparedRecipe& recipe, const std::optional<Tensor>& rng,
                 const std::optional<Tensor>& history, const Tensor& like) {
  TORCH_CHECK_VALUE(!recipe.is_stochastic || rng, op, ": recipe ", recipe.text,
                    " rounds stochastically and needs rng");
  TORCH_CHECK_VALUE(!recipe.is_delayed || history, op, ": recipe ", recipe.text,
                    " scales by history and needs amax_history");
  if (rng) {
    bridge::check_rng(op, *rng, like);
    bridge::check_memory_if_real(op, "rng", *rng);
  }
  if (history) check_history(op, *history, like);
}

void check_dtype(const char* op, const char* name, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16, op, ": expected ", name,
                    " float32 or bfloat16, got ", dtype);
}

void check_groups_of_call(const char* op, const GroupedCall& call, const SymInt& rows,
                          const Tensor& b) {
  check_groups(op, {call.table}, b);
  if (bridge::is_real(call.table)) {
    const GroupTable table = group_table_of(op, {call.table}, 0);
    bridge::with_value_errors([&] {
      check_group_table(op, table, bridge::backend_of(call.table), 0,
                        rows.guard_int(__FILE__, __LINE__));
    });
  }
  const SymInt experts = call.table.sym_size(1) - 1;
  const Tensor x = empty_result(b, {1, 1}, at::kFloat).expand_symint({rows, b.sym_size(1)});
  check_call(x, b, call.table.select(0, 0).narrow_symint(0, 0, experts), call);
}

QuantizedOperand checked_x(const char* op, const PreparedRecipe& recipe, at::TensorList x,
                           const Tensor& weight, const SymInt& k,
                           const std::optional<SymInt>& groups) {
  bridge::check_same_device(op, "x", x, weight);
  for (const Tensor& t : x) bridge::check_memory_if_real(op, "x", t);
  const bool decoded = is_decoded(x[3]);
  check_operand(op, "x", recipe.specs[kFpropX], {x[decoded ? 3 : 0], x[1], x[2]}, std::nullopt,
                {.k = k, .values_k = k, .matrices = {}, .groups = groups}, decoded);
  return {x[0], x[1], or_undefined(x[2]), x[3]};
}

void check_saved_x(const char* op, const char* name, const PreparedRecipe& recipe, at::TensorList x,
                   const SymInt& m, const SymInt& k, const Groups& groups) {
  const bool is_rowwise = recipe.specs[kWgradX].is_of_forward();
  std::optional<SymInt> count;
  if (groups.table) count = groups.count();
  InputSizes sizes = {.k = k, .values_k = k, .matrices = {}, .groups = count};
  if (!is_rowwise)
    sizes = {.k = length_of(m, groups),
             .values_k = m,
             .matrices = {},
             .groups = count,
             .is_along_contraction = count.has_value()};
  check_operand(op, name, recipe.spec_of_codes(kWgradX), x, is_rowwise ? m : k, sizes);
}

void check_saved_weight(const char* op, const PreparedRecipe& recipe, at::TensorList w,
                        const SymInt& n, const SymInt& k, const std::optional<SymInt>& experts) {
  const Spec& spec = recipe.spec_of_codes(kDgradW);
  const bool is_rowwise = recipe.specs[kDgradW].is_of_forward();
  const SymInt &rows = is_rowwise ? n : k, &cols = is_rowwise ? k : n;
  if (!w[0].defined() || !w[0].is_floating_point() || spec.is_bf16())
    return check_operand(op, "the saved weight", spec, w, rows,
                         {.k = cols, .values_k = cols, .matrices = experts, .groups = {}});
  bridge::check_value_dtype(op, "the saved weight", w[0]);
  c10::SymDimVector shape = {n, k};
  if (experts) shape = {*experts, k, n};
  TORCH_CHECK_VALUE(w[0].sym_sizes().equals(shape) && (experts || w[0].sym_stride(1) == 1), op,
                    ": expected the saved weight ", shape, " with adjacent columns, got ",
                    w[0].sym_sizes(), ", strides ", w[0].sym_strides());
  const SymInt amaxes = experts.value_or(SymInt(1)) * (spec.has_row_amax() ? k : SymInt(1));
  TORCH_CHECK_VALUE(w[2].defined() && w[2].scalar_type() == at::kFloat &&
                        (w[2].sym_numel() == 0 || w[2].sym_numel() == amaxes),
                    op, ": expected the saved weight's amax as ", amaxes,
                    " of float32 or none, got ", w[2].scalar_type(), " ", w[2].sym_sizes());
}

}  // namespace minifloat::torch_ops
