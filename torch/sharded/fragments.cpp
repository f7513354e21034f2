// Fragments of wires: where even shards of a weight are cut, where their bytes lie in a rank's
// piece, and the copies that merge gathered pieces into whole wires.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include "minifloat/partial_cast.h"
#include "ops/bridge.h"

namespace minifloat {
namespace {

using at::Tensor;
using at::TensorList;
using Texts = std::vector<std::string>;

// Ranks of a layout: more than any machine has, few enough that a list of them fits in memory.
void check_ranks(const char* op, std::int64_t ranks) {
  constexpr std::int64_t kMost = 1 << 20;
  TORCH_CHECK_VALUE(0 < ranks && ranks <= kMost, op, ": expected 1 to ", kMost, " ranks, got ",
                    ranks);
}

// The copies of one wire's fragments. numbers: where they begin in a rank's piece, then each rank's
// bytes of the wire.
void append_copies(std::vector<Copy>& copies, std::size_t index, const Tensor& wire,
                   const std::uint8_t* pieces, at::IntArrayRef numbers, std::int64_t of_piece) {
  constexpr const char* kOp = "merge_fragments";
  auto* to = wire.mutable_data_ptr<std::uint8_t>();
  const std::int64_t offset = numbers[0];
  std::int64_t last = 0;
  for (std::size_t at = 1; at < numbers.size(); at += 2) {
    std::int64_t begin = numbers[at];
    const std::int64_t end = numbers[at + 1];
    if (begin >= end) continue;
    TORCH_CHECK_VALUE(begin >= 0 && end <= wire.numel(), kOp, ": expected bytes within the ",
                      wire.numel(), " of wire ", index, ", got [", begin, ", ", end, ")");
    TORCH_CHECK_VALUE(0 <= offset && offset <= of_piece - (end - begin), kOp,
                      ": expected fragments within the ", of_piece, " bytes of a piece, got ",
                      end - begin, " from byte ", offset, " on for wire ", index);
    const std::int64_t rank = static_cast<std::int64_t>(at / 2);
    const std::uint8_t* from = pieces + rank * of_piece + offset;
    if (begin < last) copies.push_back({from++, to + begin++, 1, true});
    copies.push_back({from, to + begin, end - begin, false});
    last = end;
  }
}

// Copies the gathered pieces into whole wires, as fragment_layout has them. A byte that a rank
// shares with one before is ORed.
void merge_fragments_kernel(const Tensor& gathered, TensorList wires, at::IntArrayRef layout,
                            std::int64_t ranks) {
  constexpr const char* kOp = "merge_fragments";
  check_ranks(kOp, ranks);
  const auto stride = static_cast<std::size_t>(1 + 2 * ranks);
  TORCH_CHECK_VALUE(layout.size() == wires.size() * stride + 1, kOp, ": expected a layout of ",
                    wires.size() * stride + 1, " numbers, got ", layout.size());
  const std::int64_t of_piece = layout.back();
  TORCH_CHECK_VALUE(is_addressable({ranks, of_piece}) && gathered.scalar_type() == at::kByte &&
                        gathered.is_contiguous() && gathered.numel() == ranks * of_piece,
                    kOp, ": expected ", ranks, " contiguous pieces of ", of_piece,
                    " bytes as uint8, got ", gathered.numel(), " of ", gathered.scalar_type());
  bridge::check_memory(kOp, "the gathered pieces", gathered);
  const auto* pieces = gathered.const_data_ptr<std::uint8_t>();
  std::vector<Copy> copies;
  for (std::size_t i = 0; i < wires.size(); ++i) {
    bridge::check_same_device(kOp, "wires", wires[i], gathered);
    TORCH_CHECK_VALUE(wires[i].is_contiguous() && wires[i].scalar_type() == at::kByte, kOp,
                      ": expected contiguous uint8 wires, got ", wires[i].scalar_type());
    bridge::check_memory(kOp, "wires", wires[i]);
    append_copies(copies, i, wires[i], pieces, layout.slice(i * stride, stride), of_piece);
  }
  bridge::with_value_errors(
      [&] { copy_many(copies, bridge::backend_of(gathered), bridge::ExecutionOn(gathered)); });
}

// ---- Layout -------------------------------------------------------------------------------------
// Where `ranks` even shards of a weight begin, and its end: (ranks + 1). No byte of packed codes is
// cut in two.
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
                    ": expected no elements of a wire without columns, got cuts ", cuts);
}

// Fragments of wires side by side: specs, cols: of each wire; cuts: its (ranks + 1). For each wire:
// where its fragments begin in a rank's piece, then each rank's first and last byte of the wire. In
// the end: bytes of a piece.
std::vector<std::int64_t> fragment_layout(const Texts& specs, at::IntArrayRef cols,
                                          at::IntArrayRef cuts, std::int64_t ranks) {
  constexpr std::int64_t kAlignment = 16;
  check_ranks("fragment_layout", ranks);
  TORCH_CHECK_VALUE(
      cols.size() == specs.size() && static_cast<std::int64_t>(cuts.size()) ==
                                         static_cast<std::int64_t>(specs.size()) * (ranks + 1),
      "fragment_layout: expected cols and ", ranks + 1, " cuts for each of ", specs.size(),
      " wires, got ", cols.size(), " and ", cuts.size());
  std::vector<std::int64_t> layout;
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const std::int64_t* of_wire = cuts.data() + static_cast<std::int64_t>(i) * (ranks + 1);
    const Spec& spec = bridge::parse_spec(specs[i]);
    check_cuts(specs[i], spec, cols[i], {of_wire, static_cast<std::size_t>(ranks + 1)});
    std::int64_t largest = 0;
    layout.push_back(offset);
    for (std::int64_t r = 0; r < ranks; ++r) {
      const Span bytes =
          FlatShard{cols[i], {of_wire[r], of_wire[r + 1]}}.code_bytes(spec.code_bits());
      largest = std::max(largest, bytes.size());
      layout.insert(layout.end(), {bytes.begin, bytes.end});
    }
    offset += round_up(largest, kAlignment);
  }
  layout.push_back(offset);
  return layout;
}

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, CPU, m) { m.impl("merge_fragments", merge_fragments_kernel); }
TORCH_LIBRARY_IMPL(minifloat, CUDA, m) { m.impl("merge_fragments", merge_fragments_kernel); }
TORCH_LIBRARY_IMPL(minifloat, Meta, m) {
  m.impl("merge_fragments",
         [](const Tensor& gathered, TensorList wires, at::IntArrayRef, std::int64_t) {
           bridge::check_one_device("merge_fragments", {gathered, wires});
         });
}
TORCH_LIBRARY_IMPL(minifloat, Autograd, m) {
  m.impl("merge_fragments", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(minifloat, CatchAll, m) {
  m.impl("even_cuts", even_cuts);
  m.impl("fragment_layout", fragment_layout);
}

}  // namespace minifloat
