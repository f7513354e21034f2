#include "layers/operands.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "minifloat/core/philox.h"
#include "ops/bridge.h"
#include "ops/plain.h"

namespace minifloat {
namespace torch_ops {
namespace {

constexpr std::int64_t stream_of(std::string_view operand_and_product) {
  return static_cast<std::int64_t>(fnv1a64(operand_and_product.data(), operand_and_product.size()));
}
constexpr std::int64_t kStreams[kPlaces] = {stream_of("x/fprop"), stream_of("w/fprop"),
                                            stream_of("g/dgrad"), stream_of("w/dgrad"),
                                            stream_of("g/wgrad"), stream_of("x/wgrad")};

// Columns of an amax history (kPlaces, 1 + length): the amax in force, then the newest first.
enum HistoryColumn { kInForce, kRunning };

// One entry of a history.
Tensor entry(const Tensor& history, Place place, HistoryColumn column) {
  if (!is_plain({&history})) return history.select(1, column).select(0, place);
  return plain_view(
      history, at::kFloat, {}, {},
      history.storage_offset() + place * history.stride(0) + column * history.stride(1));
}

// The running amaxes of two places: (2).
Tensor running_pair(const Tensor& history, Place a, Place b) {
  const auto [first, last] = std::minmax(a, b);
  if (!is_plain({&history}))
    return history.select(1, kRunning).slice(0, first, last + 1, last - first);
  return plain_view(
      history, at::kFloat, {2}, {(last - first) * history.stride(0)},
      history.storage_offset() + first * history.stride(0) + kRunning * history.stride(1));
}

// Writes the step's own amax of a tensor to the running ones: one place's, or those of two that are read as they lie
// and have the same.
void record_amax(const ModuleState& state, Tensor running, const Tensor& amax) {
  if (state.pending)
    state.pending->emplace_back(std::move(running), amax);
  else
    at::maximum_out(running, running, amax);
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

// The transposed view. Layers differentiate as a whole, so it needs no history, only the count of writes to x.
Tensor transposed(const Tensor& x) {
  if (!is_plain({&x})) return x.t();
  const Tensor view = plain_transpose(x);
  share_version(view, x);
  return view;
}

QuantizedOperand as_it_is(const Tensor& values) { return {values, Tensor(), Tensor(), values}; }

}  // namespace

const PreparedRecipe& prepare(const std::string& text) {
  static std::mutex mutex;
  static std::unordered_map<std::string, PreparedRecipe> prepared;
  const std::lock_guard lock(mutex);
  if (const auto found = prepared.find(text); found != prepared.end()) return found->second;
  return prepared.emplace(text, prepared_recipe(text)).first->second;
}

void record(const PendingAmaxes& pending) {
  for (const auto& [running, amax] : pending) {
    Tensor out = running;
    at::maximum_out(out, out, amax);
  }
}

Directions quantize_both(const PreparedRecipe& recipe, const Tensor& x, const Wanted& row,
                         const Wanted& col, const ModuleState& state) {
  static const std::string kAbsent;
  QuantizeOptions options;
  const auto ask = [&](const Wanted& wanted, std::optional<Tensor>& amax, std::int64_t& stream,
                       bool& decoded) -> const std::string& {
    const Spec& spec = recipe.specs[wanted.place];
    if (!wanted.is_wanted || spec.is_bf16()) return kAbsent;
    if (spec.delayed) amax = entry(state.history, wanted.place, kInForce);
    if (spec.stochastic) options.rng = state.rng;
    stream = kStreams[wanted.place] ^ state.stream;
    decoded = wanted.decoded;
    return recipe.spec_texts[wanted.place];
  };
  const std::string& row_text = ask(row, options.amax_row, options.stream_row, options.decoded_row);
  const std::string& col_text = ask(col, options.amax_col, options.stream_col, options.decoded_col);

  Directions out;
  if (!row_text.empty() || !col_text.empty()) out = quantize(x, row_text, col_text, options);
  const auto is_bf16 = [&](const Wanted& w) { return recipe.specs[w.place].is_bf16(); };
  if (row.is_wanted && is_bf16(row)) out.first = as_it_is(x);
  if (col.is_wanted && is_bf16(col)) out.second = as_it_is(transposed(x));

  const auto is_delayed = [&](const Wanted& w) {
    return w.is_wanted && recipe.specs[w.place].delayed;
  };
  const bool alike =
      recipe.specs[row.place].transform == 0 && recipe.specs[col.place].transform == 0;
  if (is_delayed(row) && is_delayed(col) && alike) {
    record_amax(state, running_pair(state.history, row.place, col.place), out.first.amax);
  } else {
    if (is_delayed(row))
      record_amax(state, entry(state.history, row.place, kRunning), out.first.amax);
    if (is_delayed(col))
      record_amax(state, entry(state.history, col.place, kRunning), out.second.amax);
  }
  return out;
}

Directions given_both(const PreparedRecipe& recipe, const char* name, at::TensorList given,
                      const Tensor& x, const Wanted& row, const Wanted& col) {
  TORCH_CHECK_VALUE(given.size() == 8, "linear: expected ", name,
                    " as the eight tensors of layer_operands, got ", given.size());
  bridge::check_same_device("linear", name, given, x);
  const auto direction = [&](const Wanted& wanted, std::size_t first) -> QuantizedOperand {
    if (!wanted.is_wanted) return {};
    if (recipe.specs[wanted.place].is_bf16()) return as_it_is(first == 0 ? x : transposed(x));
    TORCH_CHECK_VALUE(given[first].numel() > 0 || x.numel() == 0, "linear: expected ", name,
                      first == 0 ? " with its rowwise codes" : " with its columnwise codes",
                      ", got none");
    const SymInt rows = x.sym_size(first == 0 ? 0 : 1);
    const Tensor& read = given[wanted.decoded ? first + 3 : first];
    TORCH_CHECK_VALUE(read.dim() == 2 && read.sym_size(0) == rows, "linear: expected ", name,
                      " of ", rows, " rows as read, got ", read.sym_sizes());
    // As a cast leaves what a spec has not: a recomputed forward must save what the first one saved.
    const Tensor amax = given[first + 2].numel() > 0 ? given[first + 2] : Tensor();
    return {given[first], given[first + 1], amax, given[first + 3]};
  };
  return {direction(row, 0), direction(col, 4)};
}

ProductInput product_input(const PreparedRecipe& recipe, const QuantizedOperand& operand,
                           const Wanted& wanted) {
  const Spec& spec = recipe.specs[wanted.place];
  if (wanted.decoded && !spec.is_bf16())
    return Decoded{operand.decoded, operand.scale, operand.amax};
  return cast_input(spec, operand.codes, operand.scale, operand.amax);
}

ProductInput given_input(const PreparedRecipe& recipe, const QuantizedOperand& operand,
                         const Wanted& wanted) {
  const Spec& spec = recipe.specs[wanted.place];
  if (wanted.decoded) return product_input(recipe, operand, wanted);
  return input_of(spec, operand.codes, operand.scale, operand.amax);
}

void check_history(const char* op, const Tensor& history, const Tensor& x) {
  TORCH_CHECK_VALUE(history.dim() == 2 && history.sym_size(0) == kPlaces &&
                        history.sym_size(1) >= 2 && history.scalar_type() == at::kFloat,
                    op, ": expected amax_history as float32 (", static_cast<int>(kPlaces),
                    ", 1 + length), got ", history.scalar_type(), " ", history.sym_sizes());
  TORCH_CHECK_VALUE(at::has_internal_overlap(history) != at::MemOverlap::Yes, op,
                    ": expected amax_history with memory for each entry, got strides ",
                    history.sym_strides());
  TORCH_CHECK_VALUE(history.device() == x.device(), op, ": expected amax_history on ", x.device(),
                    ", got ", history.device());
  bridge::check_memory_if_real(op, "amax_history", history);
}

Tensor as_matrix(const Tensor& x, const char* name) {
  bridge::check_memory_if_real("linear", name, x);
  if (x.dim() == 2) return x.contiguous();
  SymInt rows = 1;
  for (std::int64_t i = 0; i + 1 < x.dim(); ++i) rows = rows * x.sym_size(i);
  return x.reshape_symint({rows, x.sym_size(-1)}).contiguous();
}

}  // namespace torch_ops

namespace {

using at::Tensor;

// x (…, K) or a weight (N, K), as a layer quantizes it, for `linear` to be given again while it stays as it is: the
// eight tensors of `quantize`. x comes as its product's engine reads it, a weight in codes alone.
std::vector<Tensor> layer_operands(const Tensor& x, const std::string& text, const std::string& of,
                                   bool rowwise, bool columnwise,
                                   const std::optional<Tensor>& amax_history) {
  using namespace torch_ops;
  TORCH_CHECK_VALUE(of == "x" || of == "w", "layer_operands: expected of = 'x' or 'w', got '",
                    printable(of), "'");
  bridge::check_value_dtype("layer_operands", "x", x);
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.layout() == at::kStrided && !x.is_nested(),
                    "layer_operands: expected x as a dense tensor (…, K), got ", x.layout(), " of ",
                    x.dim(), " dimensions");
  if (amax_history) check_history("layer_operands", *amax_history, x);
  const PreparedRecipe& recipe = prepare(text);
  const bool is_x = of == "x";
  const PlannedProduct fprop = plan_product(recipe.recipe.fprop, recipe.fprop, x.device());
  const Wanted row = {is_x ? kFpropX : kFpropW, rowwise, is_x && fprop.reads_values()};
  const Wanted col = {is_x ? kWgradX : kDgradW, columnwise};
  for (const Wanted& wanted : {row, col}) {
    const Spec& spec = recipe.specs[wanted.place];
    if (!wanted.is_wanted) continue;
    TORCH_CHECK_VALUE(!spec.stochastic, "layer_operands: ", spec.str(),
                      " is of one forward alone; expected one without +sr");
    TORCH_CHECK_VALUE(!spec.delayed || amax_history, "layer_operands: ", spec.str(),
                      " needs amax_history");
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  ModuleState state;
  if (amax_history) state.history = *amax_history;
  Directions out = quantize_both(recipe, as_matrix(x), row, col, state);
  if (is_x && rowwise && !row.decoded) {
    const ProductInput read = prepare_input(fprop, recipe.specs[row.place],
                                            product_input(recipe, out.first, row), x.sym_size(-1));
    const InputTensors tensors = tensors_of(read);
    out.first.codes = *tensors.elements;
    if (tensors.scale) out.first.scale = *tensors.scale;
  }
  std::vector<Tensor> list;
  const auto append = [&](const QuantizedOperand& o, const Wanted& wanted) {
    const bool absent = !wanted.is_wanted || recipe.specs[wanted.place].is_bf16();
    const auto push = [&](const Tensor& t, at::ScalarType dtype) {
      list.push_back(!absent && t.defined() ? t : at::empty({0}, x.options().dtype(dtype)));
    };
    push(o.codes, at::kByte);
    push(o.scale, at::kFloat);
    push(o.amax, at::kFloat);
    push(o.decoded, at::kBFloat16);
  };
  append(out.first, row);
  append(out.second, col);
  return list;
}

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, CompositeImplicitAutograd, m) {
  m.impl("layer_operands", layer_operands);
}

}  // namespace minifloat
