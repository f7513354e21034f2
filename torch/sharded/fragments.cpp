// Fragments of flat codes: the cuts of even shards of a weight, the place of each fragment in a
// rank's shard codes, and the copies that merge gathered shard codes into whole flat codes.
#include <ATen/ATen.h>

#include <algorithm>

#include "minifloat/partial_cast.h"
#include "ops/bridge.h"
#include "ops/op.h"

namespace minifloat {
namespace {

using at::Tensor;
using at::TensorList;
using Texts = std::vector<std::string>;

// Requires a number of ranks that a machine can have and whose list fits in memory.
void check_ranks(const char* op, std::int64_t ranks) {
  constexpr std::int64_t kMost = 1 << 20;
  TORCH_CHECK_VALUE(0 < ranks && ranks <= kMost, op, ": expected 1 to ", kMost, " ranks, got ",
                    ranks);
}

// Appends the copies of the fragments of one weight's flat codes. numbers: the offset of the
// fragments in a rank's shard codes, then each rank's range of bytes of the flat codes
void append_copies(std::vector<Copy>& copies, std::size_t index, const Tensor& flat_codes,
                   const std::uint8_t* shard_codes, at::IntArrayRef numbers,
                   std::int64_t shard_bytes) {
  constexpr const char* kOp = "merge_fragments";
  auto* to = flat_codes.mutable_data_ptr<std::uint8_t>();
  const std::int64_t offset = numbers[0];
  std::int64_t last = 0;
  for (std::size_t at = 1; at < numbers.size(); at += 2) {
    std::int64_t begin = numbers[at];
    const std::int64_t end = numbers[at + 1];
    if (begin >= end) continue;
    TORCH_CHECK_VALUE(begin >= 0 && end <= flat_codes.numel(), kOp, ": expected bytes within the ",
                      flat_codes.numel(), " of flat codes ", index, ", got [", begin, ", ", end,
                      ")");
    TORCH_CHECK_VALUE(0 <= offset && offset <= shard_bytes - (end - begin), kOp,
                      ": expected fragments within the ", shard_bytes,
                      " bytes of shard codes, got ", end - begin, " from byte ", offset,
                      " on for flat codes ", index);
    const std::int64_t rank = static_cast<std::int64_t>(at / 2);
    const std::uint8_t* from = shard_codes + rank * shard_bytes + offset;
    if (begin < last) copies.push_back({from++, to + begin++, 1, true});
    copies.push_back({from, to + begin, end - begin, false});
    last = end;
  }
}

// Copies the gathered shard codes into whole flat codes by the numbers of fragment_layout. A byte
// that two ranks share is ORed.
void merge_fragments_kernel(const Tensor& gathered, TensorList flat_codes, at::IntArrayRef layout,
                            std::int64_t ranks) {
  constexpr const char* kOp = "merge_fragments";
  bridge::check_one_device(kOp, {gathered, flat_codes});
  if (gathered.is_meta()) return;
  check_ranks(kOp, ranks);
  const auto stride = static_cast<std::size_t>(1 + 2 * ranks);
  TORCH_CHECK_VALUE(layout.size() == flat_codes.size() * stride + 1, kOp, ": expected a layout of ",
                    flat_codes.size() * stride + 1, " numbers, got ", layout.size());
  const std::int64_t shard_bytes = layout.back();
  TORCH_CHECK_VALUE(is_addressable({ranks, shard_bytes}) && gathered.scalar_type() == at::kByte &&
                        gathered.is_contiguous() && gathered.numel() == ranks * shard_bytes,
                    kOp, ": expected ", ranks, " contiguous shard codes of ", shard_bytes,
                    " bytes as uint8, got ", gathered.numel(), " of ", gathered.scalar_type());
  bridge::check_memory(kOp, "the gathered shard codes", gathered);
  const auto* shard_codes = gathered.const_data_ptr<std::uint8_t>();
  std::vector<Copy> copies;
  for (std::size_t i = 0; i < flat_codes.size(); ++i) {
    TORCH_CHECK_VALUE(flat_codes[i].is_contiguous() && flat_codes[i].scalar_type() == at::kByte,
                      kOp, ": expected contiguous uint8 flat codes, got ",
                      flat_codes[i].scalar_type());
    bridge::check_memory(kOp, "flat codes", flat_codes[i]);
    append_copies(copies, i, flat_codes[i], shard_codes, layout.slice(i * stride, stride),
                  shard_bytes);
  }
  bridge::with_value_errors(
      [&] { copy_many(copies, bridge::backend_of(gathered), bridge::ExecutionOn(gathered)); });
}

// ---- Layout -------------------------------------------------------------------------------------
// Returns the first elements of `ranks` even shards of a weight, and the weight's end: (ranks + 1).
// No cut is inside a byte of packed codes.
std::vector<std::int64_t> even_cuts(std::int64_t rows, std::int64_t cols, std::int64_t ranks) {
  check_ranks("even_cuts", ranks);
  TORCH_CHECK_VALUE(is_addressable({rows, cols}),
                    "even_cuts: expected sizes of zero or more, 2^48 elements at most, got ", rows,
                    " x ", cols);
  const std::int64_t elements = rows * cols, of_shard = ceil_div(elements, ranks);
  std::vector<std::int64_t> cuts;
  for (std::int64_t r = 0; r <= ranks; ++r) {
    const std::int64_t at = std::min(r * of_shard, elements);
    const bool is_inside_a_byte = at < elements && at % cols % 2 == 1;
    cuts.push_back(at + (is_inside_a_byte ? 1 : 0));
  }
  return cuts;
}

void check_cuts(const std::string& text, const Spec& spec, std::int64_t cols,
                at::IntArrayRef cuts) {
  constexpr const char* kOp = "fragment_layout";
  TORCH_CHECK_VALUE(!spec.is_bf16(), kOp, ": expected specs with codes, got ", text);
  TORCH_CHECK_VALUE(std::is_sorted(cuts.begin(), cuts.end()) && cuts.front() >= 0 &&
                        is_addressable({cuts.back()}) && is_addressable({cols}),
                    kOp, ": expected cuts that rise from 0 on, 2^48 at most, got ", cuts, " for ",
                    cols, " columns");
  TORCH_CHECK_VALUE(cols > 0 || cuts.back() == 0, kOp,
                    ": expected no elements of flat codes without columns, got cuts ", cuts);
}

// Returns the layout of the fragments of several flat codes in a rank's shard codes. For each flat
// codes: the offset of the fragments in the shard codes, then each rank's first and last byte of
// the flat codes. The last number: bytes of the shard codes. specs, cols: of each flat codes; cuts:
// (ranks + 1) of each
std::vector<std::int64_t> fragment_layout(const Texts& specs, at::IntArrayRef cols,
                                          at::IntArrayRef cuts, std::int64_t ranks) {
  constexpr std::int64_t kAlignment = 16;
  check_ranks("fragment_layout", ranks);
  TORCH_CHECK_VALUE(
      cols.size() == specs.size() && static_cast<std::int64_t>(cuts.size()) ==
                                         static_cast<std::int64_t>(specs.size()) * (ranks + 1),
      "fragment_layout: expected cols and ", ranks + 1, " cuts for each of ", specs.size(),
      " flat codes, got ", cols.size(), " and ", cuts.size());
  std::vector<std::int64_t> layout;
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const std::int64_t* weight_cuts = cuts.data() + static_cast<std::int64_t>(i) * (ranks + 1);
    const Spec& spec = bridge::parse_spec(specs[i]);
    check_cuts(specs[i], spec, cols[i], {weight_cuts, static_cast<std::size_t>(ranks + 1)});
    std::int64_t largest = 0;
    layout.push_back(offset);
    for (std::int64_t r = 0; r < ranks; ++r) {
      const Span bytes =
          FlatShard{cols[i], {weight_cuts[r], weight_cuts[r + 1]}}.code_bytes(spec.code_bits());
      largest = std::max(largest, bytes.size());
      layout.insert(layout.end(), {bytes.begin, bytes.end});
    }
    offset += round_up(largest, kAlignment);
  }
  layout.push_back(offset);
  return layout;
}

const torch_ops::Op merge_fragments_op("merge_fragments", merge_fragments_kernel,
                                       torch_ops::skipped());

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, CatchAll, m) {
  m.impl("even_cuts", even_cuts);
  m.impl("fragment_layout", fragment_layout);
}

}  // namespace minifloat
