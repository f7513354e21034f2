#include "sharded/split_blocks.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "sharded/shard_cast.h"

namespace minifloat::torch_ops {
namespace {

using at::Tensor;

// The bits of -0, the lowest of all as int32: a max with them returns a value's bits.
constexpr std::int32_t kNoValue = std::numeric_limits<std::int32_t>::min();

// Returns elements [begin, end) of a weight, which the shard holds, in fp32.
Tensor masters_of(const PartialCast& cast, const Span& elements, const Tensor& like) {
  const bool is_fp32 = cast.dtype == DType::kFloat32;
  const std::int64_t first = (elements.begin - cast.shard.begin) * (is_fp32 ? 4 : 2);
  // Only read: from_blob has no const form.
  auto* data = const_cast<std::uint8_t*>(static_cast<const std::uint8_t*>(cast.master) + first);
  const auto options = like.options().dtype(is_fp32 ? at::kFloat : at::kBFloat16);
  return at::from_blob(data, {elements.size()}, options).to(at::kFloat);
}

}  // namespace

SplitBlocks::SplitBlocks(const std::vector<PartialCast>& casts, const std::vector<Spans>& shards) {
  for (std::size_t i = 0; i < casts.size(); ++i) {
    const PartialCast& cast = casts[i];
    if (!cast.spec.reads_values()) continue;
    std::vector<std::int64_t> cuts;
    for (const Spans& of_rank : shards) cuts.insert(cuts.end(), {of_rank[i].begin, of_rank[i].end});
    const AmaxGrid grid = amax_grid(cast.spec, cast.columnwise, cast.rows, cast.cols);
    add_slots(i, {cast.rows, cast.cols, grid.height, grid.width}, std::move(cuts));
  }
}

// Adds a slot for each range around the cuts that split blocks.
void SplitBlocks::add_slots(std::size_t cast, const WeightBlocks& blocks,
                            std::vector<std::int64_t> cuts) {
  std::sort(cuts.begin(), cuts.end());
  std::int64_t end = 0;  // of the slot before
  for (const std::int64_t cut : cuts) {
    if (cut < end || !blocks.are_split(cut)) continue;
    const Span around = blocks.around(cut);
    slots_.push_back({cast, around, size_});
    size_ += around.size();
    end = around.end;
  }
}

Tensor SplitBlocks::exchange_values(const Ranks& ranks, std::vector<PartialCast>& casts,
                                    const Tensor& like) const {
  if (slots_.empty()) return {};
  const Tensor bits = at::full({size_}, kNoValue, like.options().dtype(at::kInt));
  auto* memory = reinterpret_cast<std::uint8_t*>(bits.mutable_data_ptr<std::int32_t>());
  std::vector<Tensor> masters;
  std::vector<Copy> copies;
  for (const Slot& slot : slots_) {
    PartialCast& cast = casts[slot.cast];
    const Span held = {std::max(slot.elements.begin, cast.shard.begin),
                       std::min(slot.elements.end, cast.shard.end)};
    if (held.empty()) continue;
    masters.push_back(masters_of(cast, held, like));
    copies.push_back({static_cast<const std::uint8_t*>(masters.back().const_data_ptr()),
                      memory + 4 * (slot.at + held.begin - slot.elements.begin), 4 * held.size(),
                      false});
    if (held.end < slot.elements.end)
      cast.following =
          reinterpret_cast<const float*>(memory) + slot.at + held.end - slot.elements.begin;
  }
  run_copies(copies, like);
  all_reduce(ranks, bits, c10d::ReduceOp::MAX, "the values of split blocks");
  return bits;
}

}  // namespace minifloat::torch_ops
