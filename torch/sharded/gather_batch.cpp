#include "sharded/gather_batch.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "ops/bridge.h"

namespace minifloat::torch_ops {
namespace {

using at::Tensor;

constexpr const char* kGatherBatch = "GatherBatch";
constexpr std::int64_t kTableAlignment = 4;   // bytes
constexpr std::int64_t kCommonAlignment = 4;  // numbers

GatherMode mode_of(const std::string& text) {
  if (text == "one") return GatherMode::kOne;
  if (text == "both") return GatherMode::kBoth;
  TORCH_CHECK_VALUE(text == "split", kGatherBatch, ": expected the mode one, both or split, got ",
                    text);
  return GatherMode::kSplit;
}

}  // namespace

std::vector<GatheredDirection*> BatchedWeight::selected(std::int64_t selection) {
  TORCH_CHECK_VALUE(kForward <= selection && selection <= kBothGathers, kGatherBatch,
                    ": expected a selection from 0 to 2, got ", selection);
  if (mode == GatherMode::kSplit && selection != kBothGathers) return {&directions[selection]};
  std::vector<GatheredDirection*> found;
  for (GatheredDirection& direction : directions) found.push_back(&direction);
  return found;
}

Numbers table_starts(const std::vector<GatheredDirection*>& directions) {
  Numbers starts = {0};
  for (const GatheredDirection* direction : directions)
    starts.push_back(starts.back() + round_up(direction->shard.table_bytes(), kTableAlignment));
  return starts;
}

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
    BatchedWeight& last = weights_.back();
    for (const std::int64_t selection : {kForward, kBackward})
      last.table_bytes = std::max(last.table_bytes, table_starts(last.selected(selection)).back());
  }
}

// Returns the directions of a weight in a call; none where the call is of another weight.
std::vector<GatheredDirection*> GatherBatch::selected(std::size_t weight, const Choice& choice) {
  TORCH_CHECK_VALUE(
      kAllWeights <= choice.weight && choice.weight < static_cast<std::int64_t>(weights_.size()),
      kGatherBatch, ": expected a weight from -1 to ", weights_.size(), ", got ", choice.weight);
  if (choice.weight != kAllWeights && choice.weight != static_cast<std::int64_t>(weight)) return {};
  return weights_[weight].selected(choice.selection);
}

std::int64_t GatherBatch::exchanged(std::int64_t selection) {
  std::int64_t count = 0;
  for (BatchedWeight& weight : weights_)
    for (const GatheredDirection* direction : weight.selected(selection))
      count += direction->shard.exchanged();
  return count;
}

// ---- The tensors of later calls -----------------------------------------------------------------
void GatherBatch::hold_shards(Tensors shards, Tensors histories) {
  shards_ = std::move(shards), histories_ = std::move(histories);
}

void GatherBatch::hold_targets(Tensors targets) { targets_ = std::move(targets); }

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
