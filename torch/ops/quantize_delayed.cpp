// quantize_delayed: a cast of +delayed operands that scales by an amax history, and raises the
// history to the current amaxes itself.
#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include <utility>

#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/history.h"
#include "ops/kernels.h"
#include "ops/op.h"
#include "ops/ops.h"

namespace minifloat {
namespace torch_ops {
Tensor active_amax(const Tensor& history, std::int64_t row) {
  if (history.dim() != 2 || !can_skip_dispatcher({&history}))
    return history.select(-1, kActive).select(0, row);
  return direct_view(
      history, at::kFloat, {}, {},
      history.storage_offset() + row * history.stride(0) + kActive * history.stride(1));
}

HistoryEntries entries_of(const Tensor& history, std::int64_t row, std::optional<Tensor>& active) {
  active = active_amax(history, row);
  float* const first = history.mutable_data_ptr<float>() + row * history.stride(0);
  return {first + kCurrent * history.stride(-1), history.dim() == 3 ? history.stride(1) : 0};
}

}  // namespace torch_ops

namespace {

using at::Tensor;
using namespace torch_ops;

constexpr const char* kQuantizeDelayed = "quantize_delayed";

bool is_delayed(const std::string& text) {
  return !text.empty() && bridge::parse_spec(text).delayed;
}

void check_history_rows(const Tensor& x, const HistoryRows& rows) {
  const auto& [history, row, col] = rows;
  TORCH_CHECK_VALUE((history.dim() == 2 || history.dim() == 3) &&
                        history.scalar_type() == at::kFloat && history.sym_size(-1) >= 2,
                    kQuantizeDelayed,
                    ": expected amax_history as float32 (operands, 1 + length), or of experts "
                    "(operands, experts, 1 + length), got ",
                    history.scalar_type(), " ", history.sym_sizes());
  TORCH_CHECK_VALUE(at::has_internal_overlap(history) != at::MemOverlap::Yes, kQuantizeDelayed,
                    ": expected amax_history with memory for each entry, got strides ",
                    history.sym_strides());
  for (const std::int64_t place : {row, col})
    TORCH_CHECK_VALUE(place >= 0 && place < history.sym_size(0), kQuantizeDelayed,
                      ": expected rows of ", history.sym_size(0), " operands, got ", place);
  TORCH_CHECK_VALUE(history.device() == x.device(), kQuantizeDelayed, ": expected amax_history on ",
                    x.device(), ", got ", history.device());
}

// Casts in the real memory of x and of the history.
EightTensors quantize_real(const Tensor& x, const std::string& row, const std::string& col,
                           const QuantizeOptions& options) {
  const Tensor& history = options.history->history;
  bridge::check_memory(kQuantizeDelayed, "amax_history", history);
  // The history keeps its version: no cast reads current amaxes (layers/layer_state.h).
  return torch_ops::eight_tensors(
      direct_quantize(x, row, col, options, nullptr, /*shares_memory=*/false));
}

// Returns the shapes: those of quantize, without the amaxes that the history takes.
EightTensors quantize_meta(const Tensor& x, const std::string& row, const std::string& col,
                           QuantizeOptions options) {
  const HistoryRows rows = *std::exchange(options.history, std::nullopt);
  if (is_delayed(row)) options.amax_row = active_amax(rows.history, rows.row);
  if (is_delayed(col)) options.amax_col = active_amax(rows.history, rows.col);
  auto both = quantize(x, row, col, options);
  const auto none = [&] { return at::empty({0}, x.options().dtype(at::kFloat)); };
  if (is_delayed(row)) both.first.amax = none();
  if (is_delayed(col)) both.second.amax = none();
  return torch_ops::eight_tensors(both);
}

template <bool kIsMeta>
EightTensors quantize_delayed(const Tensor& x, const std::string& row, const std::string& col,
                              const Tensor& history, std::int64_t history_row,
                              std::int64_t history_col, const std::optional<Tensor>& rng,
                              std::int64_t stream_row, std::int64_t stream_col,
                              const std::optional<Tensor>& groups, std::int64_t unit,
                              const std::optional<Tensor>& row_ids, std::int64_t first_expert,
                              const std::optional<Tensor>& rows_from, bool decoded_row,
                              bool decoded_col) {
  QuantizeOptions options;
  options.rng = rng;
  options.stream_row = stream_row;
  options.stream_col = stream_col;
  options.decoded_row = decoded_row;
  options.decoded_col = decoded_col;
  options.groups = {groups, unit, rows_from};
  options.row_ids = row_ids;
  options.first_expert = first_expert;
  options.history = HistoryRows{history, history_row, history_col};
  check_history_rows(x, *options.history);
  if constexpr (kIsMeta)
    return quantize_meta(x, row, col, std::move(options));
  else
    return quantize_real(x, row, col, options);
}

// Codes have no derivative. layers/linear.cpp has the derivatives of layers.
const Op quantize_delayed_op(kQuantizeDelayed, quantize_delayed<false>, quantize_delayed<true>,
                             without_derivative());

}  // namespace

Directions torch_ops::quantize_by_history(const Tensor& x, const std::string& row,
                                          const std::string& col, const QuantizeOptions& options) {
  const auto& [history, history_row, history_col] = *options.history;
  return both_of(quantize_delayed_op(
      x, row, col, history, history_row, history_col, options.rng, options.stream_row,
      options.stream_col, options.groups.table, options.groups.unit, options.row_ids,
      options.first_expert, options.groups.rows_from, options.decoded_row, options.decoded_col));
}

}  // namespace minifloat
