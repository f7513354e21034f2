// Lists of weights that one step after another casts or transposes, handed over once: of what torch takes from Python at
// every call (tensors, texts, numbers), a step then passes the masters alone. Every step checks and reads them anew, so
// that memory may move between steps.
#include <ATen/ATen.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <utility>

#include "ops/bridge.h"
#include "sharded/master_weights.h"

namespace minifloat::torch_ops {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Numbers = std::vector<std::int64_t>;

void check_sizes(const char* what, std::size_t got, std::size_t wanted) {
  TORCH_CHECK_VALUE(got == wanted, "quantize_master_weights: expected ", wanted, " ", what,
                    ", got ", got);
}

// The directions of weights that are cast from masters.
class KeptCasts : public torch::CustomClassHolder {
 public:
  // owners: the weight of each direction, in their order; numbers: four of each, as cast_of has them
  KeptCasts(const Texts& specs, const Numbers& numbers, Numbers owners, Texts names, Tensors wires,
            Tensors scales, Tensors amaxes)
      : owners_(std::move(owners)),
        names_(std::move(names)),
        wires_(std::move(wires)),
        scales_(std::move(scales)),
        amaxes_(std::move(amaxes)) {
    check_sizes("numbers", numbers.size(), 4 * specs.size());
    check_sizes("owners", owners_.size(), specs.size());
    check_sizes("names", names_.size(), specs.size());
    check_sizes("wires", wires_.size(), specs.size());
    check_sizes("scales", scales_.size(), specs.size());
    check_sizes("amaxes", amaxes_.size(), specs.size());
    for (std::size_t i = 0; i < specs.size(); ++i)
      casts_.push_back(cast_of(specs[i], numbers.data() + 4 * i));
  }

  // masters, starts: of each weight; fragments: of each direction, or none, where codes go into the wires
  void quantize(const Tensors& masters, const Numbers& starts, const Tensors& fragments,
                const std::string& group) const {
    constexpr const char* kOp = "quantize_master_weights";
    const bool has_fragments = !fragments.empty();
    if (has_fragments) check_sizes("fragments", fragments.size(), casts_.size());
    check_sizes("start offsets", starts.size(), masters.size());
    const Tensors& codes = has_fragments ? fragments : wires_;
    if (!casts_.empty() && !masters.empty())
      bridge::check_same_device(kOp, "masters", masters[0], scales_[0]);
    std::vector<PartialCast> casts = casts_;
    for (std::size_t i = 0; i < casts.size(); ++i) {
      const auto owner = static_cast<std::size_t>(owners_[i]);
      TORCH_CHECK_VALUE(owner < masters.size(), kOp, ": expected a master of weight ", names_[i],
                        ", got ", masters.size());
      place_shard(kOp, casts[i], masters[owner], starts[owner], masters[0]);
      place_outputs(kOp, casts[i], {codes[i], has_fragments, scales_[i], amaxes_[i]}, scales_[0]);
    }
    quantize_masters(kOp, casts, names_, group, casts.empty() ? Tensor() : scales_[0]);
  }

 private:
  std::vector<PartialCast> casts_;  // without memory
  Numbers owners_;
  Texts names_;
  Tensors wires_, scales_, amaxes_;
};

// Matrices that are transposed after a gather.
class KeptTransposes : public torch::CustomClassHolder {
 public:
  // sizes: rows, cols, bits of each
  KeptTransposes(Tensors from, Tensors to, Numbers sizes)
      : from_(std::move(from)), to_(std::move(to)), sizes_(std::move(sizes)) {
    TORCH_CHECK_VALUE(to_.size() == from_.size() && sizes_.size() == 3 * from_.size(),
                      "transpose_many: expected rows, cols and bits for each of ", from_.size(),
                      " matrices");
  }

  void run() const {
    if (from_.empty()) return;
    std::vector<Transpose> jobs;
    jobs.reserve(from_.size());
    for (std::size_t i = 0; i < from_.size(); ++i)
      jobs.push_back(transpose_of(from_[i], to_[i], sizes_.data() + 3 * i, from_[0]));
    run_transposes(jobs, from_[0]);
  }

 private:
  Tensors from_, to_;
  Numbers sizes_;
};

TORCH_LIBRARY_FRAGMENT(minifloat, m) {
  m.class_<KeptCasts>("KeptCasts")
      .def(torch::init<Texts, Numbers, Numbers, Texts, Tensors, Tensors, Tensors>())
      .def("quantize", &KeptCasts::quantize);
  m.class_<KeptTransposes>("KeptTransposes")
      .def(torch::init<Tensors, Tensors, Numbers>())
      .def("run", &KeptTransposes::run);
}

}  // namespace
}  // namespace minifloat::torch_ops
