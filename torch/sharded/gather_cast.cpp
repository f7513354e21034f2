// The call before a gather: the shards of all weights of a batch to codes and tables of scales.
//
//     phase                                         launches
//     active amaxes of delayed scaling              one
//     codes and scales without a transform          those of partial_cast
//     directions under a transform                  a cast each
//     scales and codes into W's row order           one for each width of element
//     copies                                        one
#include <ATen/ATen.h>

#include <utility>

#include "ops/bridge.h"
#include "ops/history.h"
#include "ops/ops.h"
#include "sharded/gather_batch.h"

namespace minifloat::torch_ops {
namespace {

using at::Tensor;

constexpr const char* kGatherCast = "GatherBatch.cast";
constexpr std::int64_t kInputAlignment = 256;   // bytes
constexpr std::int64_t kScratchAlignment = 16;  // bytes

Copy copy_bytes(const void* from, void* to, std::int64_t bytes) {
  return {static_cast<const std::uint8_t*>(from), static_cast<std::uint8_t*>(to), bytes, false};
}

// Returns the active amax of a direction under delayed scaling, from the layer's history (operands,
// 1 + steps).
const float* active_amax(const Tensor& history, bool columnwise, const Tensor& like) {
  bridge::check_memory(kGatherCast, "histories", history);
  bridge::check_same_device(kGatherCast, "histories", history, like);
  TORCH_CHECK_VALUE(history.scalar_type() == at::kFloat && history.dim() == 2 &&
                        history.size(0) > kDgradW && history.size(1) > 0,
                    kGatherCast, ": expected float32 histories of (operands, 1 + steps), got ",
                    history.scalar_type(), " ", history.sizes());
  return history.const_data_ptr<float>() + (columnwise ? kDgradW : kFpropW) * history.stride(0);
}

// The scratch memory of one call, and its transposes and copies.
struct CastWork {
  Tensor like;
  std::vector<Tensor> scratch;
  std::vector<Transpose> transposes;
  std::vector<Copy> active;  // amaxes of delayed scaling
  std::vector<Copy> copies;  // after the transposes

  std::uint8_t* new_scratch(std::int64_t bytes) {
    scratch.push_back(at::empty({bytes}, like.options().dtype(at::kByte)));
    return scratch.back().mutable_data_ptr<std::uint8_t>();
  }
};

// Adds the copies that write a direction's table, in the order of W's rows, from the scales of the
// window.
void add_table(CastWork& work, const CastEntry& entry, std::uint8_t* scales,
               std::int64_t window_rows) {
  const RowShard& shard = entry.direction->shard;
  const std::int64_t count = shard.table_rows_of_this_rank(), row = shard.table_row_bytes();
  const std::int64_t first = shard.table_first() * row;
  std::uint8_t* by_row = scales;
  if (shard.columnwise()) {
    const bool is_whole = count == window_rows;
    by_row = is_whole ? entry.table : work.new_scratch(window_rows * row);
    work.transposes.push_back({.from = scales,
                               .to = by_row,
                               .rows = shard.table_cols(),
                               .cols = window_rows,
                               .bits = 8 * shard.scale_bytes()});
    if (is_whole) return;
  }
  if (count > 0) work.copies.push_back(copy_bytes(by_row + first, entry.table, count * row));
}

// Points a cast without a transform at its inputs and outputs.
void place(CastWork& work, const CastEntry& entry, PartialCast& cast, const Tensors& histories) {
  const RowShard& shard = entry.direction->shard;
  const ShardCast& window = shard.window();
  cast.amaxes = entry.direction->amaxes();
  cast.codes = entry.codes;
  cast.first_byte = FlatShard{cast.cols, cast.shard}.code_bytes(cast.spec.code_bits()).begin;
  cast.keeps_other_nibbles = false;
  // The first cast chooses scales, and marks its choices in the packed amaxes. An empty shard has
  // no blocks.
  cast.has_chosen_scales = entry.direction->has_chosen_scales || cast.shard.empty();
  entry.direction->has_chosen_scales = cast.spec.reads_values();
  cast.amax = entry.amax;
  if (cast.spec.delayed) {
    TORCH_CHECK_VALUE(entry.weight < histories.size(), kGatherCast,
                      ": expected an amax history of each weight, got ", histories.size());
    const float* active = active_amax(histories[entry.weight], cast.columnwise, work.like);
    work.active.push_back(copy_bytes(active, entry.amax, sizeof(float)));
  }
  if (shard.has_common_scale()) {
    cast.scale = entry.scale;
    return;
  }
  const AmaxGrid grid = amax_grid(cast.spec, cast.columnwise, cast.rows, cast.cols);
  if (!cast.columnwise && shard.table_rows_of_this_rank() == grid.rows) {
    cast.scale = entry.table;
    return;
  }
  std::uint8_t* scales = work.new_scratch(window.scales() * shard.scale_bytes());
  cast.scale = scales;
  add_table(work, entry, scales, grid.rows);
}

// Casts a shard under a transform as if the shard were a weight, with the amax of the whole weight
// where the spec has one.
void cast_transformed(CastWork& work, const CastEntry& entry, const Tensor& shard_values,
                      const Tensors& histories) {
  const GatheredDirection& direction = *entry.direction;
  const RowShard& shard = direction.shard;
  const Spec& spec = shard.spec();
  const bool columnwise = shard.columnwise();
  std::optional<Tensor> amax;
  if (spec.delayed) {
    TORCH_CHECK_VALUE(entry.weight < histories.size(), kGatherCast,
                      ": expected an amax history of each weight, got ", histories.size());
    active_amax(histories[entry.weight], columnwise, work.like);  // checks the history
    amax = histories[entry.weight].select(0, columnwise ? kDgradW : kFpropW).select(0, 0);
  } else if (shard.exchanged() > 0) {
    amax =
        direction.exchanged.narrow(0, direction.exchanged_at, shard.exchanged()).view(at::kFloat);
    if (spec.has_tensor_amax()) amax = amax->view(at::IntArrayRef{});
  }
  QuantizeOptions options;
  (columnwise ? options.amax_col : options.amax_row) = amax;
  auto [row, col] =
      quantize(shard_values, columnwise ? "" : spec.str(), columnwise ? spec.str() : "", options);
  const QuantizedOperand& q = columnwise ? col : row;
  const std::int64_t rows = shard.grown(shard.held_rows());
  if (rows > 0 && columnwise)
    work.transposes.push_back({.from = q.codes.const_data_ptr(),
                               .to = entry.codes,
                               .rows = shard.cols(),
                               .cols = rows,
                               .bits = spec.code_bits()});
  else if (rows > 0)
    work.copies.push_back(copy_bytes(q.codes.const_data_ptr(), entry.codes, shard.held_bytes()));
  if (entry.scale)
    work.copies.push_back(copy_bytes(q.scale.const_data_ptr(), entry.scale,
                                     shard.common_scales() * std::int64_t{sizeof(float)}));
  if (entry.amax)
    work.copies.push_back(copy_bytes(q.amax.const_data_ptr(), entry.amax,
                                     shard.common_amaxes() * std::int64_t{sizeof(float)}));
  const std::int64_t blocks = shard.table_rows_of_this_rank();
  if (entry.table && shard.has_row_table()) {
    const std::int64_t bytes = blocks * shard.table_row_bytes();
    work.copies.push_back(copy_bytes(q.scale.const_data_ptr(), entry.table, bytes));
    work.copies.push_back(copy_bytes(q.amax.const_data_ptr(),
                                     entry.table + shard.table_rows() * shard.table_row_bytes(),
                                     bytes));
  } else if (entry.table && blocks > 0) {
    add_table(work, entry, static_cast<std::uint8_t*>(q.scale.mutable_data_ptr()), blocks);
  }
  for (const Tensor& t : {q.codes, q.scale, q.amax}) work.scratch.push_back(t);
}

}  // namespace

// Allocates the inputs of a gather in one tensor: all codes, then all tables. Returns those of each
// weight: the codes of its directions, and its table where it has one.
std::vector<Tensors> GatherBatch::new_inputs(const Tensor& like, const Choice& choice) {
  struct Input {
    std::size_t weight;
    std::int64_t at, bytes, written;
  };
  std::vector<Input> inputs;
  std::int64_t end = 0, tables = 0;
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    const BatchedWeight& weight = weights_[i];
    const std::vector<GatheredDirection*> directions = selected(i, choice);
    std::int64_t written = 0;  // of the table
    for (const GatheredDirection* direction : directions) {
      const RowShard& shard = direction->shard;
      inputs.push_back({i, end, shard.chunk_bytes(), shard.held_bytes()});
      end += round_up(shard.chunk_bytes(), kInputAlignment);
      written += shard.table_bytes() / std::max<std::int64_t>(shard.table_rows(), 1) *
                 shard.table_rows_of_this_rank();
    }
    if (weight.table_bytes == 0 || directions.empty()) continue;
    inputs.push_back({i, -1 - tables, weight.table_bytes, written});
    tables += round_up(weight.table_bytes, kInputAlignment);
  }
  const Tensor memory = at::empty({end + tables}, like.options().dtype(at::kByte));
  std::vector<Tensors> found(weights_.size());
  bool is_table_padded = false;
  for (const Input& input : inputs) {
    const bool is_table = input.at < 0;
    const std::int64_t at = is_table ? end - 1 - input.at : input.at;
    Tensors& of_weight = found[input.weight];
    of_weight.push_back(memory.narrow(0, at, input.bytes));
    if (input.written == input.bytes) continue;
    if (is_table)
      is_table_padded = true;
    else
      of_weight.back().narrow(0, input.written, input.bytes - input.written).zero_();
  }
  if (is_table_padded) memory.narrow(0, end, tables).zero_();
  return found;
}

// Returns the selected directions in the order of the inputs, with their memory.
std::vector<CastEntry> GatherBatch::entries_of(const std::vector<Tensors>& inputs,
                                               const Choice& choice) {
  std::vector<CastEntry> entries;
  float* common = common_.mutable_data_ptr<float>();
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    const std::vector<GatheredDirection*> directions = selected(i, choice);
    if (directions.empty()) continue;
    const Numbers starts = table_starts(directions);
    std::uint8_t* table = nullptr;
    if (weights_[i].table_bytes > 0) table = inputs[i].back().mutable_data_ptr<std::uint8_t>();
    for (std::size_t k = 0; k < directions.size(); ++k) {
      const RowShard& shard = directions[k]->shard;
      entries.push_back(
          {.direction = directions[k],
           .weight = i,
           .codes = inputs[i][k].mutable_data_ptr<std::uint8_t>(),
           .table = shard.table_bytes() > 0 ? table + starts[k] : nullptr,
           .scale = shard.common_scales() > 0 ? common + directions[k]->scale_at : nullptr,
           .amax = shard.common_amaxes() > 0 ? common + directions[k]->amax_at : nullptr});
    }
  }
  return entries;
}

std::vector<Tensors> GatherBatch::cast(std::int64_t selection, std::int64_t weight,
                                       bool is_measured) {
  const Choice choice = {selection, weight};
  const at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(is_measured || exchanged(selection) == 0, kGatherCast,
                    ": expected amaxes that ranks have exchanged, got none");
  const Tensors shards = readable_shards();
  for (const Tensor& history : histories_) bridge::check_memory(kGatherCast, "histories", history);
  if (!is_measured || needs_measure(choice)) measure_alone(shards, choice);
  if (!common_.defined() || common_.device() != shards[0].device())
    common_ = at::zeros({common_size_}, shards[0].options().dtype(at::kFloat));
  const std::vector<Tensors> inputs = new_inputs(shards[0], choice);

  std::vector<GatheredDirection*> directions;
  std::vector<PartialCast> casts = untransformed_casts(shards, choice, directions);
  CastWork work;
  work.like = shards[0];
  std::vector<CastEntry> transformed;
  std::size_t cast = 0;
  for (const CastEntry& entry : entries_of(inputs, choice)) {
    if (entry.direction->shard.is_transformed())
      transformed.push_back(entry);
    else
      place(work, entry, casts[cast++], histories_);
  }
  run_copies(work.active, shards[0]);
  if (!casts.empty())
    bridge::with_value_errors([&] {
      partial_cast(casts, bridge::backend_of(shards[0]), bridge::ExecutionOn(shards[0]));
    });
  for (const CastEntry& entry : transformed) {
    const DType compute = entry.direction->shard.window().compute();
    const auto dtype = compute == DType::kBFloat16 ? at::kBFloat16 : at::kFloat;
    cast_transformed(work, entry, shards[entry.weight].to(dtype), histories_);
  }
  run_transposes(work.transposes, shards[0]);
  run_copies(work.copies, shards[0]);
  return inputs;
}

}  // namespace minifloat::torch_ops
