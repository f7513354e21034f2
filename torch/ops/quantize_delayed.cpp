// quantize_delayed: a cast of +delayed operands that scales by an amax history, and raises the
// history to the current amaxes itself.
#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

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

}  // namespace torch_ops

namespace {

using at::Tensor;
using namespace torch_ops;

constexpr const char* kQuantizeDelayed = "quantize_delayed";

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
  if (!history.is_meta()) bridge::check_memory(kQuantizeDelayed, "amax_history", history);
  // The history keeps its version: no cast reads current amaxes (layers/layer_state.h).
  return eight_tensors(direct_quantize(x, row, col, options, nullptr, /*shares_memory=*/false));
}

// Codes have no derivative. layers/linear.cpp has the derivatives of layers.
const Op quantize_delayed_op(kQuantizeDelayed, quantize_delayed, without_derivative());

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
