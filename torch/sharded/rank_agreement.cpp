#include "sharded/rank_agreement.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "minifloat/core/philox.h"
#include "ops/bridge.h"
#include "sharded/shard_cast.h"

namespace minifloat::torch_ops {
namespace {

using at::Tensor;

std::int64_t hash_of(const std::string& text) {
  return static_cast<std::int64_t>(fnv1a64(text.data(), text.size()) >> 1);  // not negative
}

// The numbers of one entry that must be the same on all ranks.
constexpr std::size_t kFields = 4;
const char* const kFieldNames[kFields] = {"name", "rows", "columns", "operand spec and dtype"};

// Maps a spec to a number without text: every step maps the spec of every weight.
std::int64_t number_of(const PartialCast& cast) {
  const Spec& spec = cast.spec;
  std::int64_t number = 0;
  for (const std::int64_t field :
       {static_cast<std::int64_t>(spec.elements), static_cast<std::int64_t>(spec.rule),
        static_cast<std::int64_t>(spec.scale_rounding), std::int64_t{spec.block_rows},
        std::int64_t{spec.block_cols}, std::int64_t{spec.delayed}, std::int64_t{cast.columnwise},
        static_cast<std::int64_t>(cast.compute)})
    number = number * 256 + field;
  return number & INT64_MAX;
}

std::vector<std::int64_t> fields_of(const std::vector<PartialCast>& casts,
                                    const std::vector<std::string>& names) {
  std::vector<std::int64_t> fields;
  fields.reserve(casts.size() * kFields);
  for (std::size_t i = 0; i < casts.size(); ++i)
    fields.insert(fields.end(),
                  {hash_of(names[i]), casts[i].rows, casts[i].cols, number_of(casts[i])});
  return fields;
}

// Returns the largest and the smallest of each number over the ranks, from one all-reduce. Waits
// for the device.
std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>> range_over(
    const Ranks& ranks, const std::vector<std::int64_t>& numbers, const Tensor& like) {
  const Tensor here = at::tensor(numbers, at::kLong);
  const Tensor both = at::cat({here, -here}).to(like.device());
  all_reduce(ranks, both, c10d::ReduceOp::MAX, "the list of weights");
  const Tensor host = both.cpu();
  const std::int64_t* values = host.const_data_ptr<std::int64_t>();
  std::vector<std::int64_t> largest(values, values + numbers.size()), smallest;
  for (std::size_t i = 0; i < numbers.size(); ++i) smallest.push_back(-values[numbers.size() + i]);
  return {largest, smallest};
}

void require_same_count(const Ranks& ranks, std::int64_t count, const Tensor& like) {
  const auto [most, fewest] = range_over(ranks, {count}, like);
  TORCH_CHECK_VALUE(most == fewest,
                    "quantize_master_weights: expected the same weights on every rank, got ", count,
                    " directions here and ", fewest[0], " to ", most[0], " over the ranks");
}

void require_same_fields(const Ranks& ranks, const std::vector<PartialCast>& casts,
                         const std::vector<std::string>& names,
                         const std::vector<std::int64_t>& fields, const Tensor& like) {
  require_same_count(ranks, static_cast<std::int64_t>(casts.size()), like);
  const auto [largest, smallest] = range_over(ranks, fields, like);
  for (std::size_t i = 0; i < fields.size(); ++i) {
    const PartialCast& cast = casts[i / kFields];
    TORCH_CHECK_VALUE(largest[i] == smallest[i], "quantize_master_weights: expected weight ",
                      names[i / kFields], " to be the same on every rank, but its ",
                      kFieldNames[i % kFields], " differs; here it is ", cast.rows, " x ",
                      cast.cols, ", ", cast.columnwise ? "columnwise " : "rowwise ",
                      cast.spec.str());
  }
}

// Returns the shards of each rank, of each cast.
std::vector<Spans> shards_of_ranks(const Ranks& ranks, const std::vector<PartialCast>& casts,
                                   const Tensor& like) {
  const auto world = static_cast<std::size_t>(ranks->getSize());
  const std::size_t here = static_cast<std::size_t>(ranks->getRank()) * casts.size();
  std::vector<std::int64_t> ends(2 * world * casts.size());
  for (std::size_t i = 0; i < casts.size(); ++i) {
    ends[2 * (here + i)] = casts[i].shard.begin;
    ends[2 * (here + i) + 1] = casts[i].shard.end;
  }
  const Tensor sent = at::tensor(ends, at::kLong).to(like.device());
  all_reduce(ranks, sent, c10d::ReduceOp::MAX, "the shards of ranks");
  const Tensor host = sent.cpu();
  const std::int64_t* values = host.const_data_ptr<std::int64_t>();
  std::vector<Spans> shards(world, Spans(casts.size()));
  for (Spans& of_rank : shards)
    for (Span& span : of_rank) {
      span = {values[0], values[1]};
      values += 2;
    }
  return shards;
}

struct RankShard {
  Span span;
  std::size_t rank;
};

std::string text_of(const RankShard& shard) {
  return "[" + std::to_string(shard.span.begin) + ", " + std::to_string(shard.span.end) +
         ") on rank " + std::to_string(shard.rank);
}

// Checks that the shards of one weight are equal or disjoint, and together the whole weight.
void require_whole(const PartialCast& cast, const std::string& name,
                   std::vector<RankShard> shards) {
  std::erase_if(shards, [](const RankShard& shard) { return shard.span.empty(); });
  std::stable_sort(shards.begin(), shards.end(), [](const RankShard& a, const RankShard& b) {
    return std::pair(a.span.begin, a.span.end) < std::pair(b.span.begin, b.span.end);
  });
  const std::int64_t elements = cast.rows * cast.cols;
  shards.push_back({{elements, elements}, 0});  // behind the last one
  RankShard before = {{0, 0}, 0};
  for (const RankShard& shard : shards) {
    const bool is_replica =
        shard.span.begin == before.span.begin && shard.span.end == before.span.end;
    if (is_replica) continue;
    TORCH_CHECK_VALUE(shard.span.begin >= before.span.end,
                      "quantize_master_weights: expected shards of weight ", name,
                      " that are equal or disjoint, got elements ", text_of(before), " and ",
                      text_of(shard));
    TORCH_CHECK_VALUE(shard.span.begin == before.span.end,
                      "quantize_master_weights: expected the shards of weight ", name,
                      " to hold its ", elements, " elements, got elements [", before.span.end, ", ",
                      shard.span.begin, ") on no rank");
    before = shard;
  }
}

void require_whole(const std::vector<PartialCast>& casts, const std::vector<std::string>& names,
                   const std::vector<Spans>& shards) {
  for (std::size_t i = 0; i < casts.size(); ++i) {
    std::vector<RankShard> of_weight;
    for (std::size_t rank = 0; rank < shards.size(); ++rank)
      of_weight.push_back({shards[rank][i], rank});
    require_whole(casts[i], names[i], std::move(of_weight));
  }
}

}  // namespace

void require_no_weights(const Ranks& ranks) {
  const std::vector<c10::Device> devices = ranks->getDeviceTypes();
  const bool has_cuda =
      at::hasCUDA() && std::any_of(devices.begin(), devices.end(),
                                   [](const c10::Device& device) { return device.is_cuda(); });
  require_same_count(ranks, 0, at::empty({0}, has_cuda ? at::kCUDA : at::kCPU));
}

Agreement::Lists& Agreement::lists_of(const Ranks& ranks) {
  std::erase_if(agreed_, [](const auto& entry) { return entry.first.expired(); });
  for (auto& [group, lists] : agreed_)
    if (group.lock() == ranks) return lists;
  agreed_.push_back({c10::weak_intrusive_ptr<c10d::ProcessGroup>(ranks), {}});
  return agreed_.back().second;
}

const SplitBlocks& Agreement::require(const Ranks& ranks, const std::vector<PartialCast>& casts,
                                      const std::vector<std::string>& names, const Tensor& like) {
  const std::vector<std::int64_t> fields = fields_of(casts, names);
  const std::uint64_t list =
      fnv1a64(reinterpret_cast<const char*>(fields.data()), fields.size() * sizeof(std::int64_t));
  Lists& lists = lists_of(ranks);
  if (const auto found = lists.find(list); found != lists.end()) return found->second;
  require_same_fields(ranks, casts, names, fields, like);
  const std::vector<Spans> shards = shards_of_ranks(ranks, casts, like);
  require_whole(casts, names, shards);
  return lists.emplace(list, SplitBlocks(casts, shards)).first->second;
}

}  // namespace minifloat::torch_ops
