#include "sharded/gather_batch.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "ops/bridge.h"

namespace minifloat::torch_ops {
namespace {

using at::Tensor;

constexpr const char* kGatherBatch = "GatherBatch";
constexpr std::int64_t kTableAlignment = 4;    // bytes
constexpr std::int64_t kCommonAlignment = 4;   // numbers
constexpr std::int64_t kInputAlignment = 256;  // bytes

GatherMode mode_of(const std::string& text) {
  if (text == "one") return GatherMode::kOne;
  if (text == "both") return GatherMode::kBoth;
  TORCH_CHECK_VALUE(text == "split", kGatherBatch, ": expected the mode one, both or split, got ",
                    text);
  return GatherMode::kSplit;
}

Selected select(BatchedWeight& weight, std::int64_t selection) {
  Selected found = {.directions = {}, .table_starts = {0}};
  const bool is_split = weight.mode == GatherMode::kSplit && selection != kBothGathers;
  for (GatheredDirection& direction : weight.directions) {
    if (is_split && &direction != &weight.directions[selection]) continue;
    found.directions.push_back(&direction);
    found.table_starts.push_back(found.table_starts.back() +
                                 round_up(direction.shard.table_bytes(), kTableAlignment));
  }
  return found;
}

// Describes the cast of a direction, with the sizes of the scales that it writes.
PlannedCast plan_cast(GatheredDirection& direction, std::size_t weight) {
  const RowShard& shard = direction.shard;
  PlannedCast planned = {.direction = &direction, .weight = weight};
  if (shard.is_transformed()) return planned;
  PartialCast& cast = planned.cast = shard.window().describe();
  const std::int64_t first = shard.first_element();
  cast.shard = {first, first + shard.held_rows() * shard.cols()};
  cast.first_byte = FlatShard{cast.cols, cast.shard}.code_bytes(cast.spec.code_bits()).begin;
  cast.keeps_other_nibbles = false;
  if (shard.has_common_scale()) return planned;
  planned.window_table_rows = amax_grid(cast.spec, cast.columnwise, cast.rows, cast.cols).rows;
  if (cast.columnwise || shard.table_rows_of_this_rank() != planned.window_table_rows)
    planned.scale_bytes = shard.window().scales() * shard.scale_bytes();
  return planned;
}

}  // namespace

// ---- The batch ----------------------------------------------------------------------------------
GatherBatch::GatherBatch(const ShardCasts& rows, const ShardCasts& cols, const Texts& modes,
                         std::int64_t world, std::int64_t rank) {
  TORCH_CHECK_VALUE(rows.size() == modes.size() && cols.size() == modes.size(), kGatherBatch,
                    ": expected two directions of each of ", modes.size(), " weights, got ",
                    rows.size(), " and ", cols.size());
  for (std::size_t i = 0; i < modes.size(); ++i) {
    BatchedWeight weight{.mode = mode_of(modes[i]), .directions = {}};
    weight.directions.push_back({.shard = RowShard(*rows[i], world, rank)});
    if (weight.mode != GatherMode::kOne)
      weight.directions.push_back({.shard = RowShard(*cols[i], world, rank)});
    for (GatheredDirection& direction : weight.directions) {
      TORCH_CHECK_VALUE(direction.shard.columnwise() == (&direction != weight.directions.data()) &&
                            direction.shard.rows() == rows[i]->rows() &&
                            direction.shard.cols() == rows[i]->cols(),
                        kGatherBatch,
                        ": expected the rowwise and the columnwise direction of weight ", i);
      TORCH_CHECK_VALUE(direction.shard.fits(), kGatherBatch,
                        ": expected shards that no transform reaches over, got ",
                        direction.shard.spec().str(), " of ", direction.shard.rows(), " rows over ",
                        world, " ranks");
      direction.scale_at = common_size_;
      direction.amax_at =
          common_size_ + round_up(direction.shard.common_scales(), kCommonAlignment);
      common_size_ =
          direction.amax_at + round_up(direction.shard.common_amaxes(), kCommonAlignment);
    }
    weights_.push_back(std::move(weight));
  }
  for (BatchedWeight& weight : weights_) {
    for (const std::int64_t selection : {kForward, kBackward, kBothGathers})
      weight.selections[selection] = select(weight, selection);
    for (const std::int64_t selection : {kForward, kBackward})
      weight.table_bytes =
          std::max(weight.table_bytes, weight.selections[selection].table_starts.back());
    const RowShard& shard = weight.directions.back().shard;
    join_bytes_ += Scratch::size_of(shard.whole_table_rows() * shard.table_row_bytes());
  }
  for (const std::int64_t selection : {kForward, kBackward, kBothGathers}) plan_casts(selection);
}

void GatherBatch::plan_casts(std::int64_t selection) {
  CastPlan& plan = plans_[selection];
  std::int64_t tables = 0;
  bool is_table_padded = false;
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    const auto& [directions, starts] = weights_[i].selections[selection];
    std::int64_t written = 0;  // of the table
    for (std::size_t k = 0; k < directions.size(); ++k) {
      const RowShard& shard = directions[k]->shard;
      PlannedCast planned = plan_cast(*directions[k], i);
      planned.codes_at = plan.bytes;
      planned.table_at = shard.table_bytes() > 0 ? tables + starts[k] : -1;
      plan.inputs.push_back({i, plan.bytes, shard.chunk_bytes()});
      if (shard.held_bytes() < shard.chunk_bytes())
        plan.padding.push_back({plan.bytes + shard.held_bytes(), plan.bytes + shard.chunk_bytes()});
      plan.bytes += round_up(shard.chunk_bytes(), kInputAlignment);
      plan.exchanged += shard.exchanged();
      // The scales that the cast writes, and those in the order of W's rows.
      if (planned.scale_bytes > 0)
        plan.scratch_bytes += Scratch::size_of(planned.scale_bytes) +
                              Scratch::size_of(planned.window_table_rows * shard.table_row_bytes());
      written += shard.table_bytes() / std::max<std::int64_t>(shard.table_rows(), 1) *
                 shard.table_rows_of_this_rank();
      plan.casts.push_back(std::move(planned));
    }
    if (weights_[i].table_bytes == 0) continue;
    plan.inputs.push_back({i, -1 - tables, weights_[i].table_bytes});
    is_table_padded = is_table_padded || written < weights_[i].table_bytes;
    tables += round_up(weights_[i].table_bytes, kInputAlignment);
  }
  for (PlannedInput& input : plan.inputs)
    if (input.at < 0) input.at = plan.bytes - 1 - input.at;
  for (PlannedCast& planned : plan.casts)
    if (planned.table_at >= 0) planned.table_at += plan.bytes;
  if (is_table_padded) plan.padding.push_back({plan.bytes, plan.bytes + tables});
  plan.bytes += tables;
}

// Returns the plan of a selection, `last` at most.
const CastPlan& GatherBatch::plan(std::int64_t selection, std::int64_t last) const {
  TORCH_CHECK_VALUE(kForward <= selection && selection <= last, kGatherBatch,
                    ": expected a selection from 0 to ", last, ", got ", selection);
  return plans_[selection];
}

std::int64_t GatherBatch::exchanged(std::int64_t selection) { return plan(selection).exchanged; }

// ---- The tensors of later calls -----------------------------------------------------------------
void GatherBatch::hold_shards(Tensors shards, Tensors histories) {
  shards_ = std::move(shards), histories_ = std::move(histories);
}

void GatherBatch::count_writes(const Tensors& tensors) {
  writes_before_.reset();
  counters_.clear();
  for (const Tensor& t : tensors) {
    TORCH_CHECK_VALUE(!t.is_inference(), kGatherBatch,
                      ": expected tensors whose writes torch counts, got an inference tensor");
    counters_.push_back(t.unsafeGetTensorImpl()->version_counter());
  }
}

std::int64_t GatherBatch::writes() const {
  std::int64_t count = 0;
  for (const c10::VariableVersion& counter : counters_) count += counter.current_version();
  return count;
}

bool GatherBatch::is_written() const { return writes_before_ != writes(); }

// Returns the shards, once they are checked, as float32 or bfloat16.
Tensors GatherBatch::readable_shards() const {
  Tensors shards = shards_;
  TORCH_CHECK_VALUE(shards.size() == weights_.size() && !shards.empty(), kGatherBatch,
                    ": expected a shard of each of ", weights_.size(), " weights, got ",
                    shards.size());
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const RowShard& shard = weights_[i].directions[0].shard;
    TORCH_CHECK_VALUE(shards[i].dim() == 2 && shards[i].size(0) == shard.held_rows() &&
                          shards[i].size(1) == shard.cols() && shards[i].is_floating_point(),
                      kGatherBatch, ": expected floats (", shard.held_rows(), ", ", shard.cols(),
                      ") as the shard of weight ", i, ", got ", shards[i].scalar_type(), " ",
                      shards[i].sizes());
    bridge::check_memory(kGatherBatch, "shards", shards[i]);
    bridge::check_same_device(kGatherBatch, "shards", shards[i], shards[0]);
    if (!bridge::is_value_dtype(shards[i].scalar_type()))
      shards[i] = values_as_computed(shards[i], i);
  }
  return shards;
}

// Returns the values of a shard in the compute dtype of its weight.
Tensor GatherBatch::values_as_computed(const Tensor& shard, std::size_t weight) const {
  const DType compute = weights_[weight].directions[0].shard.window().compute();
  return shard.to(compute == DType::kBFloat16 ? at::kBFloat16 : at::kFloat);
}

}  // namespace minifloat::torch_ops
