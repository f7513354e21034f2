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

void add_untransformed(const CastPlan& plan, std::vector<GatheredDirection*>& directions) {
  for (const PlannedCast& planned : plan.casts)
    if (!planned.direction->shard.is_transformed()) directions.push_back(planned.direction);
}

}  // namespace

std::uint32_t* GatheredDirection::amaxes() const { return bits_of(packed) + packed_at; }

// ---- One batch ----------------------------------------------------------------------------------
// Returns the casts of directions without a transform, with their shards.
std::vector<PartialCast> GatherBatch::untransformed_casts(const Tensors& shards,
                                                          const CastPlan& plan) const {
  std::vector<PartialCast> casts;
  casts.reserve(plan.casts.size());
  for (const PlannedCast& planned : plan.casts) {
    if (planned.direction->shard.is_transformed()) continue;
    const Tensor& shard = shards[planned.weight];
    TORCH_CHECK_VALUE(shard.is_contiguous(), kExchange,
                      ": expected contiguous shards of masters, got strides ", shard.strides());
    PartialCast& cast = casts.emplace_back(planned.cast);
    cast.master = shard.const_data_ptr();
    cast.dtype = shard.scalar_type() == at::kFloat ? DType::kFloat32 : DType::kBFloat16;
  }
  return casts;
}

// Measures the amaxes of the shards' current values, except those that ranks have exchanged.
void GatherBatch::measure_alone(const Tensors& shards, const CastPlan& plan) {
  std::vector<PartialCast> casts = untransformed_casts(shards, plan);
  if (casts.empty()) return;
  std::vector<GatheredDirection*> directions;
  add_untransformed(plan, directions);
  set_packed(directions, measure_amaxes(casts, shards[0]));
  run_copies(exchange_copies(directions, true), shards[0]);
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
    const GatherBatch& batch = *batches_[b];
    const CastPlan& plan = batch.plan(selection);
    const std::vector<PartialCast> more = batch.untransformed_casts(of_batches[b], plan);
    casts.insert(casts.end(), more.begin(), more.end());
    add_untransformed(plan, untransformed);
    for (const PlannedCast& planned : plan.casts) {
      const RowShard& shard = planned.direction->shard;
      if (!shard.is_transformed() || shard.exchanged() == 0) continue;
      const Tensor& values = of_batches[b][planned.weight];
      transformed.push_back(planned.direction);
      amaxes.push_back(transformed_amax(batch.values_as_computed(values, planned.weight), shard));
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
