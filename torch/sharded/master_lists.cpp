#include "sharded/master_lists.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <string>
#include <utility>

#include "ops/bridge.h"
#include "sharded/quantize_masters.h"

namespace minifloat::torch_ops {
namespace {

using at::Tensor;

constexpr const char* kQuantize = "quantize_master_weights";

void check_sizes(const char* what, std::size_t got, std::size_t expected) {
  TORCH_CHECK_VALUE(got == expected, kQuantize, ": expected ", expected, " ", what, ", got ", got);
}

// Returns the part of each of `count` matrices; a tensor without elements has none.
Tensors matrices_of(const Tensor& t, std::int64_t count, const char* name) {
  if (t.numel() == 0 || count == 1)
    return Tensors(static_cast<std::size_t>(std::max<std::int64_t>(count, 0)), t);
  TORCH_CHECK_VALUE(t.dim() > 0 && t.size(0) == count, kQuantize, ": expected ", name, " of ",
                    count, " matrices, got ", t.sizes());
  return t.unbind();
}

// A shard of a weight of `count` matrices, flat, from element `start` of the weight on.
struct MatrixShards {
  const ShardCast& cast;  // of one matrix
  std::int64_t count;
  Tensor master;
  std::int64_t start;
  std::int64_t size = cast.rows() * cast.cols();

  MatrixShards(const ShardCast& of_one, std::int64_t matrices, const Tensor& values,
               std::int64_t first)
      : cast(of_one), count(matrices), master(values), start(first) {
    if (count == 1) return;
    const std::int64_t held = master.numel();
    TORCH_CHECK_VALUE(held == 0 || (0 <= start && start <= count * size - held), kQuantize,
                      ": expected a shard within the ", count * size,
                      " elements of the weight, got ", held, " from ", start, " on");
    TORCH_CHECK_VALUE(master.is_contiguous(), kQuantize,
                      ": expected flat, contiguous shards of masters, got strides ",
                      master.strides());
    master = master.view(-1);
  }

  std::int64_t end() const { return start + master.numel(); }
  // Returns the elements of the weight that the shard has of matrix e.
  Span held_of(std::int64_t e) const {
    return {std::max(start, e * size), std::min(end(), (e + 1) * size)};
  }
  // Returns the bytes of a fragment of flat codes before an element of the shard.
  std::int64_t bytes_before(std::int64_t element) const {
    return FlatShard{cast.cols(), {start, element}}.code_bytes(cast.spec().code_bits()).size();
  }
  void check_fragment(const Tensor& fragment) const {
    const std::int64_t bytes = bytes_before(end());
    TORCH_CHECK_VALUE(fragment.dim() == 1 && fragment.numel() == bytes, kQuantize, ": expected ",
                      bytes, " contiguous bytes for the fragment of ", cast.spec().str(),
                      " elements [", start, ", ", end(), ") of ", count, " x ", cast.rows(), " x ",
                      cast.cols(), ", got ", fragment.numel());
  }
};

}  // namespace

// ---- MasterCasts --------------------------------------------------------------------------------
MasterCasts::MasterCasts(const ShardCasts& casts, const Numbers& owners, const Texts& names,
                         const Tensors& codes, const Tensors& scales, const Tensors& amaxes) {
  check_sizes("owners", owners.size(), casts.size());
  check_sizes("names", names.size(), casts.size());
  check_sizes("flat codes", codes.size(), casts.size());
  check_sizes("scales", scales.size(), casts.size());
  check_sizes("amaxes", amaxes.size(), casts.size());
  if (!casts.empty()) like_ = scales[0];
  for (std::size_t i = 0; i < casts.size(); ++i) {
    const std::int64_t count = codes[i].dim() == 3 ? codes[i].size(0) : 1;
    directions_.push_back({casts[i], static_cast<std::size_t>(owners[i]),
                           count == 1 ? Tensors{codes[i]} : codes[i].unbind(),
                           matrices_of(scales[i], count, "scales"),
                           matrices_of(amaxes[i], count, "amaxes")});
    for (std::int64_t e = 0; e < count; ++e)
      names_.push_back(count == 1 ? names[i] : names[i] + "[" + std::to_string(e) + "]");
  }
}

std::vector<PartialCast> MasterCasts::list_casts(const Tensors& masters, const Numbers& starts,
                                                 const Tensors& fragments) const {
  const bool has_fragments = !fragments.empty();
  if (has_fragments) check_sizes("fragments", fragments.size(), directions_.size());
  check_sizes("start offsets", starts.size(), masters.size());
  if (!directions_.empty() && !masters.empty())
    bridge::check_same_device(kQuantize, "masters", masters[0], like_);
  std::vector<PartialCast> casts;
  casts.reserve(names_.size());
  for (std::size_t i = 0; i < directions_.size(); ++i) {
    const MasterDirection& direction = directions_[i];
    TORCH_CHECK_VALUE(direction.owner < masters.size(), kQuantize, ": expected a master of weight ",
                      direction.owner, ", got ", masters.size());
    const auto count = static_cast<std::int64_t>(direction.codes.size());
    const MatrixShards shards(*direction.cast, count, masters[direction.owner],
                              starts[direction.owner]);
    if (has_fragments && count != 1) shards.check_fragment(fragments[i]);
    if (has_fragments)  // written instead of the flat codes, which the cast then does not check
      for (const Tensor& codes : direction.codes)
        bridge::check_memory(kQuantize, "flat codes", codes);
    for (std::int64_t e = 0; e < count; ++e) {
      Tensor master = shards.master, codes = has_fragments ? fragments[i] : direction.codes[e];
      std::int64_t start = shards.start;
      if (count > 1) {
        const Span held = shards.held_of(e);
        const std::int64_t first = held.empty() ? 0 : held.begin - shards.start;
        master = master.narrow(0, first, held.size());
        start = held.empty() ? 0 : held.begin - e * shards.size;
        if (has_fragments) {
          const std::int64_t byte = held.empty() ? 0 : shards.bytes_before(held.begin);
          const std::int64_t end = held.empty() ? 0 : shards.bytes_before(held.end);
          codes = codes.narrow(0, byte, end - byte);  // rows begin on bytes, so matrices do
        }
      }
      casts.push_back(direction.cast->describe());
      place_shard(kQuantize, casts.back(), master, start, masters[0]);
      place_outputs(kQuantize, *direction.cast, casts.back(),
                    {codes, has_fragments, direction.scales[e], direction.amaxes[e]}, like_);
    }
  }
  return casts;
}

c10::intrusive_ptr<ReadyCasts> MasterCasts::check(const c10::intrusive_ptr<MasterCasts>& self,
                                                  const Tensors& masters, const Numbers& starts,
                                                  const Tensors& fragments) {
  std::vector<PartialCast> casts = self->list_casts(masters, starts, fragments);
  // Before ranks meet: what fails after that fails on this rank alone.
  bridge::with_value_errors([&] { check_partial_casts(casts); });
  Tensors memory = masters;
  memory.insert(memory.end(), fragments.begin(), fragments.end());
  return c10::make_intrusive<ReadyCasts>(std::move(casts), self, std::move(memory));
}

void ReadyCasts::run(const std::string& group, const c10::intrusive_ptr<Agreement>& agreement) {
  std::vector<PartialCast> casts = std::exchange(casts_, {});
  quantize_masters(casts, owner_->names(), group, *agreement, owner_->like());
}

// ---- MatrixTransposes ---------------------------------------------------------------------------
MatrixTransposes::MatrixTransposes(const Tensors& from, const Tensors& to, const Numbers& sizes) {
  TORCH_CHECK_VALUE(to.size() == from.size() && sizes.size() == 3 * from.size(),
                    "transpose_many: expected rows, cols and bits for each of ", from.size(),
                    " matrices");
  for (std::size_t i = 0; i < from.size(); ++i) {
    const bool is_batch =
        from[i].dim() == 3 && to[i].dim() == 3 && from[i].size(0) == to[i].size(0);
    for (const Tensor& t : is_batch ? from[i].unbind() : Tensors{from[i]}) from_.push_back(t);
    for (const Tensor& t : is_batch ? to[i].unbind() : Tensors{to[i]}) to_.push_back(t);
    const auto of_one = sizes.begin() + static_cast<std::ptrdiff_t>(3 * i);
    while (sizes_.size() < 3 * from_.size()) sizes_.insert(sizes_.end(), of_one, of_one + 3);
  }
}

void MatrixTransposes::run() const {
  if (from_.empty()) return;
  std::vector<Transpose> jobs;
  jobs.reserve(from_.size());
  for (std::size_t i = 0; i < from_.size(); ++i)
    jobs.push_back(transpose_of(from_[i], to_[i], sizes_.data() + 3 * i, from_[0]));
  run_transposes(jobs, from_[0]);
}

}  // namespace minifloat::torch_ops
