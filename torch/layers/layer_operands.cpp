// The ops layer_operands and swiglu_operands, which quantize operands before their products, and
// those that say what a shard must be a multiple of.
#include "layers/layer_operands.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <utility>

#include "layers/expert_weights.h"
#include "layers/operands.h"
#include "ops/bridge.h"

namespace minifloat {
namespace {

using at::Tensor;
using namespace torch_ops;

void check_operands(const Tensor& x, const std::string& of, const std::optional<Tensor>& history,
                    const PreparedRecipe& recipe, const Sharding& sharding,
                    std::initializer_list<OperandUse> operands, const Groups& of_rows) {
  const std::optional<Tensor>& groups = of_rows.table;
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.layout() == at::kStrided && !x.is_nested(),
                    "layer_operands: expected x as a dense tensor (…, K), got ", x.layout(), " of ",
                    x.dim(), " dimensions");
  check_sharding("layer_operands", sharding, x);
  if (of == "x") check_tokens(recipe, sharding, x);
  const bool is_experts = of == "w" && x.dim() == 3;
  TORCH_CHECK_VALUE(!groups || (of == "x" && x.dim() == 2 && sharding.ranks == 1),
                    "layer_operands: expected groups of x (M, K) that no rank shares");
  check_groups("layer_operands", of_rows, x);
  std::optional<SymInt> experts;
  if (is_experts) experts = x.sym_size(0);
  if (groups) experts = groups->sym_size(1) - 1;
  if (history) check_history("layer_operands", *history, x, experts);
  for (const OperandUse& needed : operands) {
    const Spec& spec = recipe.spec_of_codes(needed.place);
    if (!needed.is_needed) continue;
    TORCH_CHECK_VALUE(!spec.stochastic, "layer_operands: ", spec.str(),
                      " draws new random bits in every forward; expected a spec without +sr");
    TORCH_CHECK_VALUE(!spec.delayed || history, "layer_operands: ", spec.str(),
                      " needs amax_history");
  }
}

// Appends the four tensors of one direction; empty ones where it is not needed, except for an amax
// that a later cast takes, or is bf16. Values that a product reads come without codes, also from a
// cast that writes both.
void append(std::vector<Tensor>& list, const PreparedRecipe& recipe, const QuantizedOperand& o,
            const OperandUse& needed, const Tensor& x) {
  const bool is_absent = !needed.is_needed || recipe.reads_values(needed.place);
  const auto push = [&](const Tensor& t, at::ScalarType dtype) {
    list.push_back(!is_absent && t.defined() ? t : at::empty({0}, x.options().dtype(dtype)));
  };
  push(needed.decoded ? Tensor() : o.codes, at::kByte);
  push(o.scale, at::kFloat);
  list.push_back(o.amax.defined() ? o.amax : at::empty({0}, x.options().dtype(at::kFloat)));
  push(o.decoded, at::kBFloat16);
}

// Replaces rowwise codes by the form that the product's engine reads.   k: of the rows
void prepare_codes(const PlannedProduct& fprop, const PreparedRecipe& recipe, const OperandUse& row,
                   const SymInt& k, QuantizedOperand& operand) {
  if (!row.is_needed || row.decoded || recipe.specs[row.place].is_bf16()) return;
  const ProductInput read =
      prepare_input(fprop, recipe.specs[row.place], product_input(recipe, operand, row), k);
  const InputTensors tensors = tensors_of(read);
  operand.codes = *tensors.elements;
  if (tensors.scale) operand.scale = *tensors.scale;
}

std::vector<Tensor> list_of_both(const PreparedRecipe& recipe, const Directions& both,
                                 const OperandUse& row, const OperandUse& col, const Tensor& x) {
  std::vector<Tensor> list;
  append(list, recipe, both.first, row, x);
  append(list, recipe, both.second, col, x);
  return list;
}

// Quantizes x (…, K) or a weight (N, K), or a shard of either, as a layer does: the eight tensors
// of `quantize`, which `linear` may read until the values change. x is returned in the form that
// the product's engine reads, with the rowwise codes of all ranks' tokens; a weight as codes. Of
// experts: rows of x in groups, or its rows that rows_from names, or weights (E, N, K), for
// scaled_grouped_mm.
std::vector<Tensor> layer_operands_kernel(
    const Tensor& x, const std::string& text, const std::string& of, bool rowwise, bool columnwise,
    const std::optional<Tensor>& amax_history, const std::string& group, std::int64_t rank,
    std::int64_t ranks, std::int64_t weight_dim, std::optional<std::int64_t> token_dim,
    const std::optional<Tensor>& groups, const std::optional<Tensor>& rows_from) {
  TORCH_CHECK_VALUE(of == "x" || of == "w", "layer_operands: expected of = 'x' or 'w', got '",
                    printable(of), "'");
  bridge::check_value_dtype("layer_operands", "x", x);
  const PreparedRecipe& recipe = prepare(text);
  const bool is_x = of == "x", is_sharded = ranks != 1, is_experts = !is_x && x.dim() == 3;
  const PlannedProduct fprop =
      plan_product(recipe.recipe.fprop, recipe.fprop, x.device(), groups.has_value());
  const Sharding sharding{group, rank, ranks, weight_dim, token_dim};
  const OperandUse row = {
      is_x ? kFpropX : kFpropW, rowwise,
      is_x && !is_sharded && fprop.reads_values() && !recipe.keeps_codes(kFpropX)};
  const OperandUse col = {is_x ? kWgradX : kDgradW, columnwise};
  check_operands(x, of, amax_history, recipe, sharding, {row, col}, {groups, 0, rows_from});
  const at::AutoDispatchBelowADInplaceOrView below;
  CastContext state;
  state.returns_amaxes = true;
  if (amax_history) state.history = *amax_history;
  if (is_sharded) state.sharding = &sharding;
  if (groups) state.groups = {groups, wgrad_unit(recipe), rows_from};
  Directions out =
      is_experts ? quantize_expert_weights(recipe, x, row, col, state)
                 : quantize_both(recipe, as_matrix("layer_operands", "x", x), row, col, state);
  if (is_x && rowwise && token_dim)
    out.first =
        TokenGather(sharding, token_runs(sharding, x.sym_sizes()), out.first, false).finish();
  if (is_x) prepare_codes(fprop, recipe, row, x.sym_size(-1), out.first);
  return list_of_both(recipe, out, row, col, x);
}

// Quantizes swiglu's result as the x of a product: the eight tensors that layer_operands returns of
// x. Nothing is returned of a direction under bf16, which reads the result itself.
std::vector<Tensor> swiglu_operands_kernel(
    const Tensor& product, const std::optional<Tensor>& other, const Tensor& weights,
    const std::string& text, std::optional<double> limit, double alpha, bool interleaved,
    const std::optional<Tensor>& pairs, const std::optional<Tensor>& groups, bool rowwise,
    bool columnwise, const std::optional<Tensor>& rng, const std::optional<Tensor>& row_ids,
    std::int64_t first_expert, const std::optional<Tensor>& amax_history, std::int64_t stream) {
  constexpr const char* kOp = "swiglu_operands";
  bridge::check_value_dtype(kOp, "product", product);
  TORCH_CHECK_VALUE(product.dim() == 2, kOp, ": expected product of 2 dimensions, got ",
                    product.dim());
  const ActivationArguments of = {kOp,   product,     other, &weights, limit,
                                  alpha, interleaved, pairs, groups};
  check_swiglu(of);  // also where no direction is cast
  if (groups) bridge::check_memory_if_real(kOp, "groups", *groups);
  if (row_ids) bridge::check_memory_if_real(kOp, "row_ids", *row_ids);
  CastContext state;
  if (rng) state.rng = *rng;
  if (amax_history) state.history = *amax_history;
  state.stream = stream;
  state.row_ids = row_ids;
  state.first_expert = first_expert;
  return operands_of_swiglu(of, prepare(text), rowwise, columnwise, std::move(state));
}

std::int64_t token_unit_of(const std::string& recipe) { return token_unit(prepare(recipe)); }

std::int64_t shard_multiple_of(const std::string& spec, bool columnwise, std::int64_t dim) {
  TORCH_CHECK_VALUE(dim == 0 || dim == 1, "shard_multiple: expected dim 0 or 1, got ", dim);
  return shard_multiple(bridge::parse_spec(spec), columnwise, static_cast<int>(dim));
}

// Returns the names of the six operands, by their row of an amax history.
std::vector<std::string> operand_names() {
  std::vector<std::string> names;
  for (const OperandInfo& info : kOperands) names.emplace_back(info.name);
  return names;
}

}  // namespace

namespace torch_ops {

std::vector<Tensor> operands_of_values(const char* op, const PreparedRecipe& recipe,
                                       const Tensor& like, bool rowwise, bool columnwise,
                                       const CastContext& state) {
  const std::optional<Tensor>& groups = state.groups.table;
  const PlannedProduct fprop =
      plan_product(recipe.recipe.fprop, recipe.fprop, like.device(), groups.has_value());
  const OperandUse row{kFpropX, rowwise, fprop.reads_values() && !recipe.keeps_codes(kFpropX)},
      col{kWgradX, columnwise};
  std::optional<SymInt> experts;
  if (groups) experts = groups->sym_size(1) - 1;
  if (state.history.defined()) check_history(op, state.history, like, experts);
  if (state.rng.defined()) {
    bridge::check_rng(op, state.rng, like);
    bridge::check_memory_if_real(op, "rng", state.rng);
  }
  for (const OperandUse& needed : {row, col}) {
    const Spec& spec = recipe.spec_of_codes(needed.place);
    if (!needed.is_needed) continue;
    TORCH_CHECK_VALUE(!spec.stochastic || state.rng.defined(), op, ": ", spec.str(),
                      " rounds stochastically and needs rng, an int64 tensor (seed, count)");
    TORCH_CHECK_VALUE(!spec.delayed || state.history.defined(), op, ": ", spec.str(),
                      " needs amax_history");
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  Directions out = quantize_both(recipe, like, row, col, state);
  prepare_codes(fprop, recipe, row, like.sym_size(-1), out.first);
  return list_of_both(recipe, out, row, col, like);
}

std::vector<Tensor> operands_of_swiglu(const ActivationArguments& of, const PreparedRecipe& recipe,
                                       bool rowwise, bool columnwise, CastContext state) {
  if (of.groups) state.groups = {of.groups, wgrad_unit(recipe)};
  state.cast = [&](const std::string& r, const std::string& c, const QuantizeOptions& options) {
    return quantize_activation(of, r, c, options);
  };
  return operands_of_values(of.op, recipe, of.like_h(), rowwise, columnwise, state);
}

std::vector<Tensor> operands_of_rows(const PreparedRecipe& recipe, const Tensor& x, bool rowwise,
                                     bool columnwise, const Groups& groups, const Tensor& amax) {
  constexpr const char* kOp = "layer_operands";
  bridge::check_value_dtype(kOp, "x", x);
  check_groups(kOp, groups, x);
  CastContext state;
  state.groups = {groups.table, wgrad_unit(recipe), groups.rows_from};
  if (amax.defined()) state.amax = amax;
  return operands_of_values(kOp, recipe, as_matrix(kOp, "x", x), rowwise, columnwise, state);
}

}  // namespace torch_ops

TORCH_LIBRARY_IMPL(minifloat, CompositeImplicitAutograd, m) {
  m.impl("layer_operands", layer_operands_kernel);
  m.impl("swiglu_operands", swiglu_operands_kernel);
}
TORCH_LIBRARY_IMPL(minifloat, CatchAll, m) {
  m.impl("token_unit", token_unit_of);
  m.impl("shard_multiple", shard_multiple_of);
  m.impl("operand_names", operand_names);
}

}  // namespace minifloat
