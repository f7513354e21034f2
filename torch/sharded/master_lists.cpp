#include "sharded/master_lists.h"

#include <ATen/ATen.h>

#include <utility>

#include "ops/bridge.h"
#include "sharded/quantize_masters.h"

namespace minifloat::torch_ops {
namespace {

using at::Tensor;

void check_sizes(const char* what, std::size_t got, std::size_t expected) {
  TORCH_CHECK_VALUE(got == expected, "quantize_master_weights: expected ", expected, " ", what,
                    ", got ", got);
}

}  // namespace

// ---- MasterCasts --------------------------------------------------------------------------------
MasterCasts::MasterCasts(ShardCasts casts, Numbers owners, Texts names, Tensors codes,
                         Tensors scales, Tensors amaxes, c10::intrusive_ptr<Agreement> agreement)
    : casts_(std::move(casts)),
      owners_(std::move(owners)),
      names_(std::move(names)),
      codes_(std::move(codes)),
      scales_(std::move(scales)),
      amaxes_(std::move(amaxes)),
      agreement_(std::move(agreement)) {
  check_sizes("owners", owners_.size(), casts_.size());
  check_sizes("names", names_.size(), casts_.size());
  check_sizes("flat codes", codes_.size(), casts_.size());
  check_sizes("scales", scales_.size(), casts_.size());
  check_sizes("amaxes", amaxes_.size(), casts_.size());
}

void MasterCasts::quantize(const Tensors& masters, const Numbers& starts, const Tensors& fragments,
                           const std::string& group) const {
  constexpr const char* kOp = "quantize_master_weights";
  const bool has_fragments = !fragments.empty();
  if (has_fragments) check_sizes("fragments", fragments.size(), casts_.size());
  check_sizes("start offsets", starts.size(), masters.size());
  const Tensors& codes = has_fragments ? fragments : codes_;
  if (!casts_.empty() && !masters.empty())
    bridge::check_same_device(kOp, "masters", masters[0], scales_[0]);
  std::vector<PartialCast> casts;
  casts.reserve(casts_.size());
  for (std::size_t i = 0; i < casts_.size(); ++i) {
    const auto owner = static_cast<std::size_t>(owners_[i]);
    TORCH_CHECK_VALUE(owner < masters.size(), kOp, ": expected a master of weight ", names_[i],
                      ", got ", masters.size());
    casts.push_back(casts_[i]->describe());
    place_shard(kOp, casts[i], masters[owner], starts[owner], masters[0]);
    place_outputs(kOp, *casts_[i], casts[i], {codes[i], has_fragments, scales_[i], amaxes_[i]},
                  scales_[0]);
  }
  quantize_masters(casts, names_, group, *agreement_, casts.empty() ? Tensor() : scales_[0]);
}

// ---- MatrixTransposes ---------------------------------------------------------------------------
MatrixTransposes::MatrixTransposes(Tensors from, Tensors to, Numbers sizes)
    : from_(std::move(from)), to_(std::move(to)), sizes_(std::move(sizes)) {
  TORCH_CHECK_VALUE(to_.size() == from_.size() && sizes_.size() == 3 * from_.size(),
                    "transpose_many: expected rows, cols and bits for each of ", from_.size(),
                    " matrices");
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
