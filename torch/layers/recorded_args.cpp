#include "layers/recorded_args.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "ops/bridge.h"
#include "ops/tracing.h"

namespace minifloat::torch_ops {
namespace {

bool records_recipe(const PreparedRecipe& recipe) {
  // Else what backward reads of W is W itself, or what forward reads.
  return !recipe.reads_values(kFpropX) && !recipe.reads_values(kFpropW) &&
         !recipe.reads_values(kDgradW) && !recipe.keeps_codes(kFpropW);
}

}  // namespace

Tensor empty_result(const Tensor& like, c10::SymIntArrayRef shape, at::ScalarType dtype) {
  return at::empty_symint(shape, like.options().dtype(dtype));
}

bool records_forward(const PreparedRecipe& recipe, const Layers& layers, const Tensor& t) {
  if (!is_compiled(t) || layers.shards.sharding || layers.groups ||
      !layers.prequantized.weight.empty())
    return false;
  return records_recipe(recipe);
}

bool records_backward(const SavedLayers& layers, const std::vector<Tensor>& grads) {
  const auto is_recorded = [](const Tensor& g) { return !g.defined() || is_compiled(g); };
  return std::all_of(grads.begin(), grads.end(), is_recorded) && !layers.sharding &&
         !layers.groups && !layers.accumulation.is_on();
}

bool saves_weight_itself(const ForwardPass& pass) {
  return pass.layers.recomputes_weights && pass.saved && pass.needs.dx;
}

bool returns_swizzled(const ForwardPass& pass, std::size_t i) {
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

QuantizedOperand checked_x(const char* op, const PreparedRecipe& recipe, at::TensorList x,
                           const Tensor& weight, const SymInt& k) {
  bridge::check_same_device(op, "x", x, weight);
  for (const Tensor& t : x) bridge::check_memory_if_real(op, "x", t);
  const bool decoded = is_decoded(x[3]);
  check_operand(op, "x", recipe.specs[kFpropX], x[decoded ? 3 : 0], x[1], x[2], std::nullopt, k,
                decoded);
  return {x[0], x[1], or_undefined(x[2]), x[3]};
}

void check_operand(const char* op, const char* name, const Spec& spec, const Tensor& elements,
                   const Tensor& scale, const Tensor& amax, const std::optional<SymInt>& rows,
                   const SymInt& cols, bool is_decoded) {
  TORCH_CHECK_VALUE(elements.defined() && scale.defined() && amax.defined(), op, ": expected ",
                    name, " as three tensors, got none");
  check_input(name, spec, input_of(spec, elements, scale, amax),
              {.k = cols, .values_k = cols, .matrices = {}, .groups = {}});
  const at::ScalarType dtype = elements.scalar_type();
  TORCH_CHECK_VALUE(
      spec.is_bf16() || (elements.is_contiguous() &&
                         (dtype == at::kByte || is_decoded || dtype == at::kFloat8_e4m3fn)),
      op, ": expected contiguous ", name, " as codes or values are, got ", dtype, ", strides ",
      elements.sym_strides());
  TORCH_CHECK_VALUE(!rows || elements.sym_size(0) == *rows, op, ": expected ", name, " of ",
                    rows.value_or(0), " rows, got ", elements.sym_size(0));
}

void check_saved_x(const char* op, const char* name, const PreparedRecipe& recipe, at::TensorList x,
                   const SymInt& m, const SymInt& k) {
  const bool is_rowwise = recipe.specs[kWgradX].is_of_forward();
  check_operand(op, name, recipe.spec_of_codes(kWgradX), x[0], x[1], x[2], is_rowwise ? m : k,
                is_rowwise ? k : m);
}

void check_saved_weight(const char* op, const PreparedRecipe& recipe, at::TensorList w,
                        const SymInt& n, const SymInt& k) {
  const Spec& spec = recipe.spec_of_codes(kDgradW);
  const bool is_rowwise = recipe.specs[kDgradW].is_of_forward();
  if (!w[0].defined() || !w[0].is_floating_point() || spec.is_bf16())
    return check_operand(op, "the saved weight", spec, w[0], w[1], w[2], is_rowwise ? n : k,
                         is_rowwise ? k : n);
  bridge::check_value_dtype(op, "the saved weight", w[0]);
  const c10::SymDimVector shape = {n, k}, of_amax(spec.has_row_amax() ? 1 : 0, k);
  TORCH_CHECK_VALUE(w[0].sym_sizes().equals(shape) && w[0].sym_stride(1) == 1, op,
                    ": expected the saved weight (", n, ", ", k, ") with adjacent columns, got ",
                    w[0].sym_sizes(), ", strides ", w[0].sym_strides());
  TORCH_CHECK_VALUE(w[2].defined() && w[2].scalar_type() == at::kFloat &&
                        (w[2].sym_numel() == 0 || w[2].sym_sizes().equals(of_amax)),
                    op, ": expected the saved weight's amax as float32 ", of_amax, " or none");
}

}  // namespace minifloat::torch_ops
