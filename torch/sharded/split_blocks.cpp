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

std::vector<Span> shards_of(const std::vector<PartialCast>& casts) {
  std::vector<Span> shards;
  for (const PartialCast& cast : casts)
    if (cast.spec.reads_values()) shards.push_back(cast.shard);
  return shards;
}

// Returns the begin and the end of each rank's shards, rank after rank.
std::vector<std::int64_t> shards_of_ranks(const Ranks& ranks, const std::vector<Span>& shards,
                                          const Tensor& like) {
  const std::size_t of_rank = 2 * shards.size(), here = ranks->getRank() * of_rank;
  std::vector<std::int64_t> ends(ranks->getSize() * of_rank);
  for (std::size_t i = 0; i < shards.size(); ++i)
    ends[here + 2 * i] = shards[i].begin, ends[here + 2 * i + 1] = shards[i].end;
  const Tensor sent = at::tensor(ends, at::kLong).to(like.device());
  all_reduce(ranks, sent, c10d::ReduceOp::MAX, "the shards of ranks");
  const Tensor host = sent.cpu();
  std::copy_n(host.const_data_ptr<std::int64_t>(), ends.size(), ends.begin());
  return ends;
}

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

SplitBlocks::SplitBlocks(const Ranks& ranks, const std::vector<PartialCast>& casts,
                         const Tensor& like)
    : shards_(shards_of(casts)) {
  if (shards_.empty()) return;
  const std::vector<std::int64_t> ends = shards_of_ranks(ranks, shards_, like);
  std::size_t read = 0;  // among the casts whose rule reads values
  for (std::size_t i = 0; i < casts.size(); ++i) {
    const PartialCast& cast = casts[i];
    if (!cast.spec.reads_values()) continue;
    std::vector<std::int64_t> cuts;
    for (std::size_t at = 2 * read++; at < ends.size(); at += 2 * shards_.size())
      cuts.insert(cuts.end(), {ends[at], ends[at + 1]});
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

bool SplitBlocks::has_shards_of(const std::vector<PartialCast>& casts) const {
  const auto are_equal = [](const Span& a, const Span& b) {
    return a.begin == b.begin && a.end == b.end;
  };
  const std::vector<Span> shards = shards_of(casts);
  return std::equal(shards.begin(), shards.end(), shards_.begin(), shards_.end(), are_equal);
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
