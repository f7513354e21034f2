// The amaxes of shards: measured from the current values, and exchanged between ranks.
#include <ATen/ATen.h>

#include <algorithm>

#include "ops/bridge.h"
#include "ops/ops.h"
#include "sharded/gather_batch.h"

namespace minifloat::torch_ops {
namespace {

using at::Tensor;

constexpr const char* kExchange = "GatherBatch";

std::uint32_t* bits_of(const Tensor& t) {
  return reinterpret_cast<std::uint32_t*>(t.mutable_data_ptr<std::int32_t>());
}

Copy copy_amaxes(const void* from, void* to, std::int64_t count) {
  return {static_cast<const std::uint8_t*>(from), static_cast<std::uint8_t*>(to), 4 * count, false};
}

// Returns the amax of values under a transform: int32 bits, flat.
Tensor transformed_amax(const Tensor& values, const RowShard& shard) {
  return amax(values, shard.spec().str(), shard.columnwise()).view(-1).view(at::kInt);
}

// Returns the copies between the packed amaxes of directions and the exchanged ones.
std::vector<Copy> exchange_copies(const std::vector<GatheredDirection*>& directions,
                                  bool is_to_packed) {
  std::vector<Copy> copies;
  for (const GatheredDirection* direction : directions) {
    if (direction->shard.exchanged() == 0 || direction->shard.is_transformed()) continue;
    std::uint32_t* exchanged = bits_of(direction->exchanged) + direction->exchanged_at;
    for (const AmaxRange& range : direction->shard.exchanged_ranges()) {
      std::uint32_t* packed = direction->amaxes() + range.packed;
      std::uint32_t* common = exchanged + range.exchanged;
      if (packed == common) continue;
      copies.push_back(is_to_packed ? copy_amaxes(common, packed, range.count)
                                    : copy_amaxes(packed, common, range.count));
    }
  }
  return copies;
}

// Points directions without a transform at their amaxes in a packed tensor.
void set_packed(const std::vector<GatheredDirection*>& directions, const Tensor& packed) {
  std::int64_t at = 0;
  for (GatheredDirection* direction : directions) {
    direction->packed = packed, direction->packed_at = at, direction->has_chosen_scales = false;
    at += direction->shard.window().packed_amaxes();
  }
}

}  // namespace

std::uint32_t* GatheredDirection::amaxes() const { return bits_of(packed) + packed_at; }

// ---- One batch ----------------------------------------------------------------------------------
// Returns the partial casts, with their shards, of the selected directions without a transform.
std::vector<PartialCast> GatherBatch::untransformed_casts(
    const Tensors& shards, const Choice& choice, std::vector<GatheredDirection*>& directions) {
  std::vector<PartialCast> casts;
  for (std::size_t i = 0; i < weights_.size(); ++i)
    for (GatheredDirection* direction : selected(i, choice)) {
      if (direction->shard.is_transformed()) continue;
      casts.push_back(direction->shard.window().describe());
      place_shard(kExchange, casts.back(), shards[i], direction->shard.first_element(), shards[0]);
      directions.push_back(direction);
    }
  return casts;
}

// Measures the amaxes of the shards' current values, except those that ranks have exchanged.
void GatherBatch::measure_alone(const Tensors& shards, const Choice& choice) {
  std::vector<GatheredDirection*> directions;
  std::vector<PartialCast> casts = untransformed_casts(shards, choice, directions);
  if (casts.empty()) return;
  set_packed(directions, measure_amaxes(casts, shards[0]));
  run_copies(exchange_copies(directions, true), shards[0]);
}

// Tells whether a direction has no amaxes yet.
bool GatherBatch::needs_measure(const Choice& choice) {
  for (std::size_t i = 0; i < weights_.size(); ++i)
    for (const GatheredDirection* direction : selected(i, choice)) {
      const RowShard& shard = direction->shard;
      TORCH_CHECK_VALUE(shard.exchanged() == 0 || direction->exchanged.defined(), kExchange,
                        ": expected amaxes that ranks have exchanged, got none");
      if (!shard.is_transformed() && !direction->packed.defined()) return true;
    }
  return false;
}

// ---- Several batches ----------------------------------------------------------------------------
// Returns the shards of each batch, as casts read them.
std::vector<Tensors> AmaxExchange::shards_of_batches() const {
  TORCH_CHECK_VALUE(!batches_.empty(), kExchange, ": expected at least one batch");
  std::vector<Tensors> found;
  for (const auto& batch : batches_) {
    found.push_back(batch->readable_shards());
    bridge::check_same_device(kExchange, "shards", found.back()[0], found[0][0]);
  }
  return found;
}

Tensor AmaxExchange::measure(std::int64_t selection) {
  const at::NoGradGuard no_grad;
  pending_.clear();
  is_of_both_ = selection == kBothGathers;
  const std::vector<Tensors> of_batches = shards_of_batches();
  const Tensor& like = of_batches[0][0];
  std::vector<GatheredDirection*> untransformed, transformed;
  std::vector<PartialCast> casts;
  Tensors amaxes;  // of directions under a transform
  for (std::size_t b = 0; b < batches_.size(); ++b) {
    GatherBatch& batch = *batches_[b];
    const std::vector<PartialCast> more =
        batch.untransformed_casts(of_batches[b], {selection, kAllWeights}, untransformed);
    casts.insert(casts.end(), more.begin(), more.end());
    for (std::size_t i = 0; i < batch.weights_.size(); ++i)
      for (GatheredDirection* direction : batch.weights_[i].selected(selection)) {
        if (!direction->shard.is_transformed() || direction->shard.exchanged() == 0) continue;
        transformed.push_back(direction);
        amaxes.push_back(
            transformed_amax(batch.values_as_computed(of_batches[b][i], i), direction->shard));
      }
  }
  if (!casts.empty()) set_packed(untransformed, measure_amaxes(casts, like));
  pending_ = untransformed;
  pending_.insert(pending_.end(), transformed.begin(), transformed.end());
  const bool is_all_exchanged =
      transformed.empty() && !untransformed.empty() &&
      std::none_of(untransformed.begin(), untransformed.end(),
                   [](const auto* direction) { return direction->shard.spec().has_blocks(); });
  if (is_all_exchanged) {
    for (GatheredDirection* direction : untransformed)
      direction->exchanged_at = direction->packed_at;
    exchanged_ = untransformed[0]->packed;
  } else {
    std::int64_t count = 0;
    for (GatheredDirection* direction : pending_) {
      direction->exchanged_at = count;
      count += direction->shard.exchanged();
    }
    exchanged_ = at::zeros({count}, like.options().dtype(at::kInt));
  }
  for (GatheredDirection* direction : pending_) direction->exchanged = exchanged_;
  std::vector<Copy> copies = exchange_copies(untransformed, false);
  for (std::size_t i = 0; i < transformed.size(); ++i)
    copies.push_back(copy_amaxes(amaxes[i].const_data_ptr(),
                                 bits_of(exchanged_) + transformed[i]->exchanged_at,
                                 amaxes[i].numel()));
  run_copies(copies, like);
  return exchanged_;
}

void AmaxExchange::accept(const Tensor& exchanged) {
  TORCH_CHECK_VALUE(exchanged_.defined() && exchanged.scalar_type() == at::kInt &&
                        exchanged.is_contiguous() && exchanged.numel() == exchanged_.numel() &&
                        exchanged.device() == exchanged_.device(),
                    kExchange, ": expected the amaxes that measure has returned, got ",
                    exchanged.scalar_type(), " ", exchanged.sizes());
  bridge::check_memory(kExchange, "exchanged amaxes", exchanged);
  for (GatheredDirection* direction : pending_) direction->exchanged = exchanged;
  run_copies(exchange_copies(pending_, true), exchanged);
  if (is_of_both_)
    for (const auto& batch : batches_) batch->writes_before_ = batch->writes();
  pending_.clear();
  exchanged_ = Tensor();
}

}  // namespace minifloat::torch_ops
