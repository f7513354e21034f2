#include "layers/operands.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "layers/operand_forms.h"
#include "layers/shard_casts.h"
#include "minifloat/core/philox.h"
#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/history.h"
#include "ops/tracing.h"

namespace minifloat {
namespace torch_ops {
namespace {

// Returns the random stream of an operand within its module. Under +eden the streams of a product's
// two operands differ in the lowest bit alone, so that both have the same signs (core/eden.h).
std::int64_t operand_stream(const Spec& spec, Place place) {
  std::string_view name = kOperands[place].name;
  if (!spec.is_eden()) return static_cast<std::int64_t>(fnv1a64(name.data(), name.size()));
  name.remove_prefix(name.find('/') + 1);
  const std::uint64_t product = fnv1a64(name.data(), name.size()) & ~std::uint64_t{1};
  return static_cast<std::int64_t>(product | (kOperands[place].is_second ? 1 : 0));
}

PreparedRecipe prepared_recipe(const std::string& text) {
  const Recipe r = bridge::with_value_errors([&] { return Recipe::parse(text); });
  PreparedRecipe out = {.recipe = r,
                        .text = r.str(),
                        .fprop = r.fprop.str(),
                        .dgrad = r.dgrad.str(),
                        .wgrad = r.wgrad.str(),
                        .specs = {r.fprop.a, r.fprop.b, r.dgrad.a, r.dgrad.b, r.wgrad.a, r.wgrad.b},
                        .spec_texts = {},
                        .is_stochastic = r.is_stochastic(),
                        .is_delayed = r.is_delayed()};
  for (int i = 0; i < kPlaces; ++i)
    if (!out.specs[i].is_bf16()) out.spec_texts[i] = out.specs[i].str();
  return out;
}

// Returns the transposed view. Layers differentiate as a whole, so the view needs no history, only
// the version counter of x.
Tensor transposed(const Tensor& x) {
  const bool is_direct = x.dim() == 2 && can_skip_dispatcher({&x});
  const Tensor view = is_direct ? direct_transpose(x) : x.transpose(-2, -1);
  share_version(view, x);
  return view;
}

QuantizedOperand unquantized(const Tensor& values) { return {values, Tensor(), Tensor(), values}; }

// Returns the dimension along which the ranks cut the matrix of an operand; none: it is whole.
std::optional<int> cut_of(const CastContext& state, const OperandUse& needed) {
  if (!state.sharding) return std::nullopt;
  return state.sharding->cut_dim(kOperands[needed.place].matrix);
}

bool is_delayed(const PreparedRecipe& recipe, const OperandUse& needed) {
  return needed.is_needed && recipe.specs[needed.place].delayed;
}

// Returns whether the kernel of a cast raises the history: the amax is that of one layer's whole
// operand, and nothing else reads it.
bool cast_raises_history(const PreparedRecipe& recipe, const OperandUse& row, const OperandUse& col,
                         const CastContext& state) {
  return (is_delayed(recipe, row) || is_delayed(recipe, col)) && state.history.defined() &&
         !state.sharding && !state.cast && !state.returns_amaxes && state.other_histories.empty();
}

// Casts x by an op for forward and an op for backward, so that a checkpoint computes the latter
// alone again. The amax that it scales by is an op too, whose result mf.checkpoint_policy keeps.
Directions quantize_apart(const PreparedRecipe& recipe, const Tensor& x, Place row, Place col,
                          const CastPlan& plan) {
  QuantizeOptions of_row = plan.options, of_col = plan.options;
  const Spec& spec = recipe.specs[col];
  if (!of_col.amax_col && (spec.has_tensor_amax() || spec.has_row_amax())) {
    of_col.amax_col = amax(x, plan.col, /*columnwise=*/true, of_col);
    if (has_amax_of_values(recipe.specs[row]) && has_amax_of_values(spec))
      of_row.amax_row = of_col.amax_col;
  }
  of_row.amax_col.reset(), of_col.amax_row.reset();
  // A direction that is absent has no form.
  of_row.decoded_col = of_row.fp8_col = of_row.swizzled_col = false;
  of_col.decoded_row = of_col.fp8_row = of_col.swizzled_row = false;
  return {quantize(x, plan.row, "", of_row).first, quantize(x, "", plan.col, of_col).second};
}

constexpr std::int64_t kRandomGroup = 16;  // elements of one call of Philox

}  // namespace

std::int64_t shard_multiple(const Spec& spec, bool columnwise, int dim) {
  if (spec.is_bf16()) return 1;
  const bool is_contraction = dim == (columnwise ? 0 : 1);
  if (!is_contraction) return std::max(spec.block_rows, 1);
  return std::max<std::int64_t>(
      {spec.block_cols, spec.transform, 8 / spec.code_bits(), spec.stochastic ? kRandomGroup : 1});
}

void check_shards(const char* op, const PreparedRecipe& recipe, const Sharding& sharding,
                  const SymInt& length) {
  for (int place = 0; place < kPlaces; ++place) {
    const OperandInfo& info = kOperands[place];
    const std::optional<int> dim = sharding.cut_dim(info.matrix);
    if (!dim || (info.matrix == Matrix::kX && *dim == 0)) continue;
    const std::int64_t multiple = shard_multiple(recipe.specs[place], info.columnwise, *dim);
    const char name = "NK"[sharding.weight_dim];
    TORCH_CHECK_VALUE(length % multiple == 0, op, ": expected ", name, " / ranks as a multiple of ",
                      multiple, " for ", info.name, " in ", recipe.specs[place].str(), ", got ",
                      name, " = ", length * sharding.ranks, " over ", sharding.ranks, " ranks, ",
                      length, " each");
  }
}

std::int64_t token_unit(const PreparedRecipe& recipe) {
  const Spec &row = recipe.specs[kFpropX], &col = recipe.specs[kWgradX];
  // Random bits depend on each row's position in the whole x.
  if (row.is_bf16() || row.stochastic || col.stochastic) return 0;
  return std::max(shard_multiple(row, false, 0), shard_multiple(col, true, 0));
}

void check_tokens(const PreparedRecipe& recipe, const Sharding& sharding, const Tensor& x) {
  if (!sharding.token_dim) return;
  const std::int64_t multiple = token_unit(recipe);
  const SymInt length = token_runs(sharding, x.sym_sizes()).length;
  TORCH_CHECK_VALUE(multiple > 0 && length % multiple == 0, "linear: expected ",
                    multiple > 0 ? "runs of tokens as a multiple of " : "x whole, under ",
                    multiple > 0 ? std::to_string(multiple) : recipe.text, ", got x ",
                    x.sym_sizes(), " cut by its tokens");
}

const PreparedRecipe& prepare(const std::string& text) {
  static std::mutex mutex;
  static std::unordered_map<std::string, PreparedRecipe> prepared;
  const std::lock_guard lock(mutex);
  if (const auto found = prepared.find(text); found != prepared.end()) return found->second;
  return prepared.emplace(text, prepared_recipe(text)).first->second;
}

void raise_histories(const PreparedRecipe& recipe, const OperandUse& row, const OperandUse& col,
                     const CastContext& state, const Directions& found, bool is_cut) {
  if (!state.history.defined() || state.is_raised) return;
  const Spec &row_spec = recipe.specs[row.place], &col_spec = recipe.specs[col.place];
  CurrentAmaxes amaxes;
  const auto add = [&](Place a, Place b, const Tensor& amax) {
    const auto [first, last] = std::minmax(a, b);
    const Tensor largest = is_cut ? largest_of_ranks(*state.sharding, amax) : amax;
    amaxes.push_back({state.history, first, last, largest});
    for (const Tensor& other : state.other_histories)
      amaxes.push_back({other, first, last, largest});
  };
  // One amax is that of both directions, also where backward casts the columnwise one.
  if (is_delayed(recipe, row) && (is_delayed(recipe, col) || state.casts_other_later) &&
      has_amax_of_history(row_spec, col_spec)) {
    add(row.place, col.place, found.first.amax);
  } else {
    if (is_delayed(recipe, row)) add(row.place, row.place, found.first.amax);
    if (is_delayed(recipe, col)) add(col.place, col.place, found.second.amax);
  }
  if (state.deferred_amaxes)
    state.deferred_amaxes->insert(state.deferred_amaxes->end(), amaxes.begin(), amaxes.end());
  else
    raise(amaxes);
}

CastPlan plan_cast(const PreparedRecipe& recipe, const Tensor& x, const OperandUse& row,
                   const OperandUse& col, const CastContext& state) {
  static const std::string kAbsent;
  QuantizeOptions options;
  const std::optional<int> cut = cut_of(state, row);
  const auto set_options = [&](const OperandUse& needed, std::optional<Tensor>& amax,
                               std::int64_t& stream, bool& decoded) -> const std::string& {
    const Spec& spec = recipe.specs[needed.place];
    if (!needed.is_needed || spec.is_bf16()) return kAbsent;
    if (spec.delayed) amax = active_amax(state.history, needed.place);
    if (spec.stochastic) {  // else equal casts of a trace are one
      options.rng = state.rng;
      stream = operand_stream(spec, needed.place) ^ state.stream;
    }
    decoded = needed.decoded;
    return recipe.spec_texts[needed.place];
  };
  options.groups = state.groups;
  options.first_expert = state.first_expert;
  const std::string& row_text =
      set_options(row, options.amax_row, options.stream_row, options.decoded_row);
  const std::string& col_text =
      set_options(col, options.amax_col, options.stream_col, options.decoded_col);
  // The caller may pass the transpose of a matrix, with its directions exchanged.
  const bool is_exchanged = !kOperands[col.place].columnwise;
  if (state.amax) (is_exchanged ? options.amax_row : options.amax_col) = state.amax;
  (is_exchanged ? options.apart_row : options.apart_col) = state.apart_col;
  if (state.amax_of_rowwise && !row_text.empty()) options.amax_row = state.amax_of_rowwise;
  options.amaxes_of_columns =
      state.casts_other_later && row.is_needed && !col.is_needed && !state.sharding &&
      finds_amaxes_of_columns(recipe.specs[row.place], recipe.specs[col.place]);
  options.fp8_row = writes_fp8(recipe, x, row, state);
  options.fp8_col = writes_fp8(recipe, x, col, state);
  options.swizzled_row = writes_swizzled(recipe, x, row, state);
  options.swizzled_col = writes_swizzled(recipe, x, col, state);
  if (state.groups.table && options.rng && !row_text.empty()) options.row_ids = state.row_ids;
  if (cut && (!row_text.empty() || !col_text.empty() || state.casts_other_later)) {
    // Ranks exchange the amaxes of both directions at once.
    const OperandUse other{col.place, col.is_needed || state.casts_other_later};
    place_shard(recipe, x, row, other, *state.sharding, *cut, options);
  }
  return {row_text, col_text, std::move(options)};
}

Directions quantize_both(const PreparedRecipe& recipe, const Tensor& x, const OperandUse& row,
                         const OperandUse& col, const CastContext& state) {
  if (col.is_needed && recipe.specs[col.place].is_of_forward()) {
    CastContext of_codes = state;
    of_codes.casts_other_later = false;
    if (state.amax) of_codes.amax_of_rowwise = std::exchange(of_codes.amax, std::nullopt);
    const OperandUse codes{.place = recipe.place_of_codes(col.place)};
    Directions out = quantize_both(recipe, x, codes, {col.place, false}, of_codes);
    out.second = out.first;
    if (!row.is_needed) out.first = {};
    return out;
  }
  CastPlan plan = plan_cast(recipe, x, row, col, state);
  const bool is_raised = cast_raises_history(recipe, row, col, state);
  if (is_raised) {
    plan.options.history = HistoryRows{state.history, row.place, col.place};
    if (is_delayed(recipe, row)) plan.options.amax_row.reset();
    if (is_delayed(recipe, col)) plan.options.amax_col.reset();
  }
  const auto cut = cut_of(state, row);
  Tensor amax_of_ranks;  // of the columnwise operand that backward casts
  if (cut && state.casts_other_later && recipe.specs[col.place].is_of_forward())
    amax_of_ranks = plan.options.amax_row.value_or(Tensor());
  else if (cut && state.casts_other_later)
    amax_of_ranks = std::exchange(plan.options.amax_col, std::nullopt).value_or(Tensor());
  Directions out;
  if (!plan.row.empty() || !plan.col.empty()) {
    if (state.cast)
      out = state.cast(plan.row, plan.col, plan.options);
    else if (cut)
      out = quantize_shard(recipe, x, row, col, plan, *state.sharding, *cut);
    else if (row.place == kFpropX && !plan.row.empty() && !plan.col.empty() && !recipe.is_delayed &&
             is_checkpointed(x))
      out = quantize_apart(recipe, x, row.place, col.place, plan);
    else
      out = quantize(x, plan.row, plan.col, plan.options);
  }
  // What was not cast is undefined: the dispatcher returns empty tensors where direct calls return
  // none, and what a layer saves does not depend on a dispatch mode.
  if (plan.row.empty()) out.first = {};
  if (plan.col.empty() && !state.apart_col) {
    const Tensor amax = out.second.amax;
    out.second = {};
    if (plan.options.amaxes_of_columns && amax.defined() && amax.sym_numel() != 0)
      out.second.amax = amax;
  }
  const auto is_bf16 = [&](const OperandUse& w) { return recipe.specs[w.place].is_bf16(); };
  if (row.is_needed && is_bf16(row)) out.first = unquantized(x);
  if (col.is_needed && is_bf16(col)) out.second = unquantized(transposed(x));
  if (!is_raised) raise_histories(recipe, row, col, state, out, cut.has_value());
  if (state.casts_other_later && !plan.options.amaxes_of_columns) {
    const QuantizedOperand& cast = row.is_needed ? out.first : out.second;
    (row.is_needed ? out.second : out.first).amax =
        cut ? amax_of_ranks : amax_of_both(recipe, row.place, col.place, cast.amax);
  }
  return out;
}

Tensor amax_of_both(const PreparedRecipe& recipe, Place row, Place col, const Tensor& amax) {
  const bool is_shared =
      has_amax_of_values(recipe.specs[row]) && has_amax_of_values(recipe.spec_of_codes(col));
  return is_shared && amax.defined() ? amax.clone() : Tensor();
}

Directions prequantized_both(const PreparedRecipe& recipe, const char* op, const char* name,
                             at::TensorList tensors, const Tensor& x, const SymInt& rows,
                             const OperandUse& row, const OperandUse& col, const SymInt& parts) {
  TORCH_CHECK_VALUE(tensors.size() == 8, op, ": expected ", name,
                    " as the eight tensors of layer_operands, got ", tensors.size());
  bridge::check_same_device(op, name, tensors, x);
  const auto direction = [&](const OperandUse& needed, std::size_t first) -> QuantizedOperand {
    if (!needed.is_needed) return {};
    const bool is_row = first == 0;
    if (recipe.reads_values(needed.place)) return unquantized(is_row ? x : transposed(x));
    const SymInt own = x.sym_size(recipe.specs[needed.place].is_of_forward() ? -2 : -1);
    const SymInt read_rows = is_row ? rows : own;
    const Tensor& read = tensors[needed.decoded ? first + 3 : first];
    TORCH_CHECK_VALUE(read.numel() > 0 || x.numel() == 0, op, ": expected ", name,
                      is_row ? " with its rowwise " : " with its columnwise ",
                      needed.decoded ? "values" : "codes", ", got none");
    TORCH_CHECK_VALUE(read.dim() == x.dim() && read.sym_size(-2) == read_rows, op, ": expected ",
                      name, " of ", read_rows, " rows as read, got ", read.sym_sizes());
    const Spec& spec = recipe.spec_of_codes(needed.place);
    TORCH_CHECK_VALUE(!spec.delayed || tensors[first + 2].numel() == parts, op, ": expected ", name,
                      " with the amax of ", spec.str(), ", which the history takes, got ",
                      tensors[first + 2].numel(), " elements");
    if (spec.delayed) bridge::check_memory_if_real(op, name, tensors[first + 2]);
    // Undefined, as a cast's, where the spec has none: a recomputed forward saves the same tensors.
    const bool has_amax = tensors[first + 2].numel() > 0 || spec.has_outer_amax();  // of no row too
    const Tensor amax = has_amax ? tensors[first + 2] : Tensor();
    return {tensors[first], tensors[first + 1], amax, tensors[first + 3]};
  };
  return {direction(row, 0), direction(col, 4)};
}

ProductInput product_input(const PreparedRecipe& recipe, const QuantizedOperand& operand,
                           const OperandUse& needed) {
  const Spec& spec = recipe.specs[needed.place];
  if (needed.given && !needed.decoded)
    return input_of(spec, operand.codes, operand.scale, operand.amax);
  if (needed.decoded && !spec.is_bf16())
    return Decoded{operand.decoded, operand.scale, operand.amax};
  if (!spec.is_bf16() && operand.codes.scalar_type() == at::kFloat8_e4m3fn)
    return Fp4AsFp8{operand.codes, operand.scale, operand.amax};
  return cast_input(spec, operand.codes, operand.scale, operand.amax);
}

Values values_of_forward(const PreparedRecipe& recipe, Place place, const QuantizedOperand& operand,
                         const SymInt& cols, at::ScalarType dtype,
                         const std::optional<Tensor>& table) {
  return {
      values_of_codes(recipe.spec_of_codes(place), operand, cols, table, dtype).transpose(-2, -1)};
}

Tensor values_of_codes(const Spec& spec, const QuantizedOperand& rows, const SymInt& cols,
                       const std::optional<Tensor>& table, at::ScalarType dtype) {
  QuantizedOperand q = rows;  // an op takes empty tensors for those that a spec lacks
  for (Tensor* t : {&q.scale, &q.amax})
    if (!t->defined()) *t = at::empty({0}, q.codes.options().dtype(at::kFloat));
  if (spec.transform == 0) return dequantize(q, spec.str(), cols, dtype, table);
  const Tensor transformed = dequantize(q, spec.str(), cols, at::kFloat, table);
  const SymInt padded = transformed.sym_size(-1);
  const Tensor values = inverse_hadamard(transformed.reshape_symint({-1, padded}), spec.transform);
  return to_dtype(values.view_symint(transformed.sym_sizes()).narrow_symint(-1, 0, cols), dtype);
}

void check_history(const char* op, const Tensor& history, const Tensor& x,
                   const std::optional<SymInt>& experts) {
  const bool is_right = history.dim() == (experts ? 3 : 2) && history.sym_size(0) == kPlaces &&
                        (!experts || history.sym_size(1) == *experts) &&
                        history.sym_size(-1) >= 2 && history.scalar_type() == at::kFloat;
  TORCH_CHECK_VALUE(is_right, op, ": expected amax_history as float32 (", static_cast<int>(kPlaces),
                    experts ? ", experts" : "", ", 1 + length), got ", history.scalar_type(), " ",
                    history.sym_sizes());
  TORCH_CHECK_VALUE(at::has_internal_overlap(history) != at::MemOverlap::Yes, op,
                    ": expected amax_history with memory for each entry, got strides ",
                    history.sym_strides());
  TORCH_CHECK_VALUE(history.device() == x.device(), op, ": expected amax_history on ", x.device(),
                    ", got ", history.device());
  bridge::check_memory_if_real(op, "amax_history", history);
}

Tensor as_matrix(const char* op, const char* name, const Tensor& x) {
  bridge::check_memory_if_real(op, name, x);
  if (x._is_zerotensor()) return as_matrix(op, name, x.clone());  // which has memory and strides
  if (x.dim() == 2) return x.contiguous();
  SymInt rows = 1;
  for (std::int64_t i = 0; i + 1 < x.dim(); ++i) rows = rows * x.sym_size(i);
  return x.reshape_symint({rows, x.sym_size(-1)}).contiguous();
}

}  // namespace torch_ops
}  // namespace minifloat
