// Quantized weights from sharded masters: the kernels of minifloat/partial_cast.h over lists of tensors, with the one
// all-reduce between them.
//
//     masters -> partial_amax -> packed int32 amaxes -> all-reduce MAX -> partial_cast -> codes, scales, amax
//
// An entry of the lists is one direction of one weight. Its numbers (`geometry`): columnwise, rows, cols, whether the
// compute dtype is bf16, the shard's first element, and whether codes are the shard's own fragment of the wire.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "bridge.h"
#include "master_weights.h"
#include "rank_agreement.h"

namespace minifloat {
namespace {

using at::Tensor;
using at::TensorList;
using torch_ops::Texts;

constexpr std::int64_t kNumbers = 6;  // an entry's
// Every entry's amaxes start at a multiple of this many, so that they may be read 16 bytes at a time.
constexpr std::int64_t kAligned = 4;

int bits_of(const Spec& spec) { return spec.elements == Elements::kE2m1 ? 4 : 8; }

// The spec and the geometry of each entry; memory is the next steps'.
std::vector<PartialCast> parse_entries(const char* op, const Texts& specs,
                                       at::IntArrayRef geometry) {
  TORCH_CHECK_VALUE(geometry.size() == specs.size() * kNumbers, op, ": expected ", kNumbers,
                    " numbers for each of ", specs.size(), " specs, got ", geometry.size());
  std::vector<PartialCast> casts;
  casts.reserve(specs.size());
  for (std::size_t i = 0; i < specs.size(); ++i)
    casts.push_back(torch_ops::cast_of(specs[i], geometry.data() + i * kNumbers));
  return casts;
}

std::vector<PartialCast> parse_shards(const char* op, TensorList masters, const Texts& specs,
                                      at::IntArrayRef geometry) {
  std::vector<PartialCast> casts = parse_entries(op, specs, geometry);
  TORCH_CHECK_VALUE(masters.size() == casts.size(), op, ": expected a master for each of ",
                    casts.size(), " specs, got ", masters.size());
  for (std::size_t i = 0; i < casts.size(); ++i)
    torch_ops::place_shard(op, casts[i], masters[i], geometry[i * kNumbers + 4], masters[0]);
  return casts;
}

// Points every entry at its part of a packed tensor; returns how many numbers that has.
std::int64_t place_amaxes(std::vector<PartialCast>& casts, std::uint32_t* packed) {
  std::int64_t count = 0;
  for (PartialCast& cast : casts) {
    if (packed) cast.amaxes = packed + count;
    count +=
        round_up(amax_grid(cast.spec, cast.columnwise, cast.rows, cast.cols).count(), kAligned);
  }
  return count;
}
std::uint32_t* bits_of(const Tensor& packed) {
  return reinterpret_cast<std::uint32_t*>(packed.mutable_data_ptr<std::int32_t>());
}

Tensor amaxes_of_shards(std::vector<PartialCast>& casts, const Tensor& like) {
  const Tensor packed = at::zeros({place_amaxes(casts, nullptr)}, like.options().dtype(at::kInt));
  place_amaxes(casts, bits_of(packed));
  bridge::with_value_errors(
      [&] { partial_amax(casts, bridge::backend_of(like), bridge::ExecutionOn(like)); });
  return packed;
}

std::int64_t scale_bytes(const PartialCast& cast) {
  const AmaxGrid grid = amax_grid(cast.spec, cast.columnwise, cast.rows, cast.cols);
  const std::int64_t scales =
      std::max<std::int64_t>(grid.cells(), cast.spec.rule == ScaleRule::kTensor);
  return scales * (cast.spec.scale_type() == ScaleType::kFloat32 ? 4 : 1);
}

void place_all_outputs(const char* op, std::vector<PartialCast>& casts, at::IntArrayRef geometry,
                       TensorList codes, TensorList scales, TensorList amaxes) {
  TORCH_CHECK_VALUE(codes.size() == casts.size() && scales.size() == casts.size() &&
                        amaxes.size() == casts.size(),
                    op, ": expected codes, scale and amax of each of ", casts.size(), " specs");
  for (std::size_t i = 0; i < casts.size(); ++i)
    torch_ops::place_outputs(
        op, casts[i], {codes[i], geometry[i * kNumbers + 5] != 0, scales[i], amaxes[i]}, codes[0]);
}

}  // namespace

// ---- One direction of one weight -----------------------------------------------------------------
PartialCast torch_ops::cast_of(const std::string& spec, const std::int64_t* numbers) {
  PartialCast cast;
  cast.spec = bridge::parse_spec(spec);
  cast.columnwise = numbers[0] != 0;
  cast.rows = numbers[1], cast.cols = numbers[2];
  cast.compute = numbers[3] ? DType::kBFloat16 : DType::kFloat32;
  return cast;
}

void torch_ops::place_shard(const char* op, PartialCast& cast, const Tensor& master,
                            std::int64_t start, const Tensor& like) {
  const bool is_fp32 = master.scalar_type() == at::kFloat;
  TORCH_CHECK_VALUE(is_fp32 || master.scalar_type() == at::kBFloat16, op,
                    ": expected masters in float32 or bfloat16, got ", master.scalar_type());
  TORCH_CHECK_VALUE(master.is_contiguous(), op,
                    ": expected flat, contiguous shards of masters, got strides ",
                    master.strides());
  bridge::check_same_device(op, "masters", master, like);
  cast.shard = {start, start + master.numel()};
  cast.master = master.const_data_ptr();
  cast.dtype = is_fp32 ? DType::kFloat32 : DType::kBFloat16;
}

void torch_ops::place_outputs(const char* op, PartialCast& cast, const CastOutputs& outputs,
                              const Tensor& like) {
  const auto& [codes, is_fragment, scale, amax] = outputs;
  const Span bytes = FlatShard{cast.cols, cast.shard}.code_bytes(bits_of(cast.spec));
  const std::int64_t wanted =
      is_fragment ? bytes.size()
                  : cast.rows * ceil_div<std::int64_t>(cast.cols * bits_of(cast.spec), 8);
  TORCH_CHECK_VALUE(codes.is_contiguous() && static_cast<std::int64_t>(codes.nbytes()) == wanted,
                    op, ": expected ", wanted, " contiguous bytes for ",
                    is_fragment ? "the fragment of " : "the codes of ", cast.spec.str(),
                    " elements [", cast.shard.begin, ", ", cast.shard.end, ") of ", cast.rows,
                    " x ", cast.cols, ", got ", codes.nbytes());
  const std::int64_t of_scales = scale_bytes(cast);
  TORCH_CHECK_VALUE(scale.is_contiguous() && static_cast<std::int64_t>(scale.nbytes()) == of_scales,
                    op, ": expected ", of_scales, " contiguous bytes of scales for ",
                    cast.spec.str(), " of ", cast.rows, " x ", cast.cols, ", got ", scale.nbytes());
  for (const Tensor* t : {&codes, &scale, &amax})
    bridge::check_same_device(op, "codes, scales and amax", *t, like);
  cast.codes = static_cast<std::uint8_t*>(codes.mutable_data_ptr());
  cast.first_byte = is_fragment ? bytes.begin : 0;
  cast.keeps_neighbours = !is_fragment;
  cast.scale = scale.mutable_data_ptr();
  cast.amax = amax.numel() > 0 ? amax.mutable_data_ptr<float>() : nullptr;
}

void torch_ops::quantize_masters(const char* op, std::vector<PartialCast>& casts,
                                 const Texts& names, const std::string& group, const Tensor& like) {
  if (casts.empty() && group.empty()) return;
  TORCH_CHECK_VALUE(!casts.empty(), op, ": expected at least one weight, got none");
  const Ranks ranks = resolve_ranks(group);
  if (ranks) require_agreement(ranks, casts, names, like);
  const Tensor packed = amaxes_of_shards(casts, like);
  if (ranks) all_reduce_max(ranks, packed);
  bridge::with_value_errors(
      [&] { partial_cast(casts, bridge::backend_of(packed), bridge::ExecutionOn(packed)); });
}

Transpose torch_ops::transpose_of(const Tensor& from, const Tensor& to, const std::int64_t* sizes,
                                  const Tensor& like) {
  constexpr const char* kOp = "transpose_many";
  const std::int64_t rows = sizes[0], cols = sizes[1], bits = sizes[2];
  const auto bytes = [&](std::int64_t r, std::int64_t c) {
    return r * ceil_div<std::int64_t>(c * bits, 8);
  };
  TORCH_CHECK_VALUE(from.is_contiguous() && to.is_contiguous() &&
                        static_cast<std::int64_t>(from.nbytes()) == bytes(rows, cols) &&
                        static_cast<std::int64_t>(to.nbytes()) == bytes(cols, rows),
                    kOp, ": expected contiguous ", rows, " x ", cols, " elements of ", bits,
                    " bits, ", bytes(rows, cols), " bytes to ", bytes(cols, rows), ", got ",
                    from.nbytes(), " to ", to.nbytes());
  bridge::check_same_device(kOp, "matrices", from, like);
  bridge::check_same_device(kOp, "matrices", to, like);
  return {.from = from.const_data_ptr(),
          .to = to.mutable_data_ptr(),
          .rows = rows,
          .cols = cols,
          .bits = static_cast<int>(bits)};
}

void torch_ops::run_transposes(const std::vector<Transpose>& jobs, const Tensor& like) {
  bridge::with_value_errors(
      [&] { transpose_many(jobs, bridge::backend_of(like), bridge::ExecutionOn(like)); });
}

namespace {

// ---- Ops -----------------------------------------------------------------------------------------
Tensor partial_amax_kernel(TensorList masters, const Texts& specs, at::IntArrayRef geometry) {
  TORCH_CHECK_VALUE(!masters.empty(), "partial_amax: expected at least one weight, got none");
  std::vector<PartialCast> casts = parse_shards("partial_amax", masters, specs, geometry);
  return amaxes_of_shards(casts, masters[0]);
}

void partial_cast_kernel(const Tensor& packed, TensorList masters, const Texts& specs,
                         at::IntArrayRef geometry, TensorList codes, TensorList scales,
                         TensorList amaxes) {
  std::vector<PartialCast> casts = parse_shards("partial_cast", masters, specs, geometry);
  const std::int64_t count = place_amaxes(casts, nullptr);
  TORCH_CHECK_VALUE(
      packed.scalar_type() == at::kInt && packed.is_contiguous() && packed.numel() == count,
      "partial_cast: expected ", count, " packed int32 amaxes, got ", packed.numel(), " of ",
      packed.scalar_type());
  place_amaxes(casts, bits_of(packed));
  place_all_outputs("partial_cast", casts, geometry, codes, scales, amaxes);
  bridge::with_value_errors(
      [&] { partial_cast(casts, bridge::backend_of(packed), bridge::ExecutionOn(packed)); });
}

void quantize_master_weights_kernel(TensorList masters, const Texts& specs,
                                    at::IntArrayRef geometry, TensorList codes, TensorList scales,
                                    TensorList amaxes, const Texts& names,
                                    const std::string& group) {
  constexpr const char* kOp = "quantize_master_weights";
  if (masters.empty() && group.empty()) return;
  TORCH_CHECK_VALUE(!masters.empty(), kOp, ": expected at least one weight, got none");
  std::vector<PartialCast> casts = parse_shards(kOp, masters, specs, geometry);
  place_all_outputs(kOp, casts, geometry, codes, scales, amaxes);
  TORCH_CHECK_VALUE(names.size() == casts.size(), kOp, ": expected a name for each of ",
                    casts.size(), " specs, got ", names.size());
  bridge::check_same_device(kOp, "masters", masters[0], codes[0]);
  torch_ops::quantize_masters(kOp, casts, names, group, codes[0]);
}

void transpose_many_kernel(TensorList from, TensorList to, at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(from.size() == to.size() && sizes.size() == 3 * from.size(),
                    "transpose_many: expected rows, cols and bits for each of ", from.size(),
                    " matrices");
  if (from.empty()) return;
  std::vector<Transpose> jobs;
  jobs.reserve(from.size());
  for (std::size_t i = 0; i < from.size(); ++i)
    jobs.push_back(torch_ops::transpose_of(from[i], to[i], sizes.data() + 3 * i, from[0]));
  torch_ops::run_transposes(jobs, from[0]);
}

// Gathered pieces into whole wires, as fragment_layout has them. A byte that a rank shares with one before is ORed.
void merge_fragments_kernel(const Tensor& gathered, TensorList wires, at::IntArrayRef layout,
                            std::int64_t ranks) {
  constexpr const char* kOp = "merge_fragments";
  const auto stride = static_cast<std::size_t>(1 + 2 * ranks);
  TORCH_CHECK_VALUE(layout.size() == wires.size() * stride + 1, kOp, ": expected a layout of ",
                    wires.size() * stride + 1, " numbers, got ", layout.size());
  TORCH_CHECK_VALUE(gathered.is_contiguous() && gathered.scalar_type() == at::kByte &&
                        gathered.numel() == ranks * layout.back(),
                    kOp, ": expected ", ranks, " pieces of ", layout.back(), " bytes, got ",
                    gathered.numel());
  const auto* pieces = gathered.const_data_ptr<std::uint8_t>();
  std::vector<Copy> copies;
  for (std::size_t i = 0; i < wires.size(); ++i) {
    const std::int64_t* numbers = layout.data() + i * stride;
    bridge::check_same_device(kOp, "wires", wires[i], gathered);
    TORCH_CHECK_VALUE(wires[i].is_contiguous() && wires[i].scalar_type() == at::kByte, kOp,
                      ": expected contiguous uint8 wires, got ", wires[i].scalar_type());
    auto* wire = wires[i].mutable_data_ptr<std::uint8_t>();
    std::int64_t last = 0;
    for (std::int64_t r = 0; r < ranks; ++r) {
      const std::uint8_t* from = pieces + r * layout.back() + numbers[0];
      std::int64_t begin = numbers[1 + 2 * r];
      const std::int64_t end = numbers[2 + 2 * r];
      if (begin >= end) continue;
      TORCH_CHECK_VALUE(begin >= 0 && end <= wires[i].numel(), kOp, ": expected bytes within the ",
                        wires[i].numel(), " of wire ", i, ", got [", begin, ", ", end, ")");
      if (begin < last) {
        copies.push_back({from++, wire + begin++, 1, true});
      }
      copies.push_back({from, wire + begin, end - begin, false});
      last = end;
    }
  }
  bridge::with_value_errors(
      [&] { copy_many(copies, bridge::backend_of(gathered), bridge::ExecutionOn(gathered)); });
}

// ---- Layout --------------------------------------------------------------------------------------
// Where `ranks` even shards of a weight begin, and its end: (ranks + 1). No byte of packed codes is cut in two.
std::vector<std::int64_t> even_cuts(std::int64_t rows, std::int64_t cols, std::int64_t ranks) {
  TORCH_CHECK_VALUE(rows >= 0 && cols >= 0 && ranks > 0,
                    "even_cuts: expected sizes of zero or more and at least one rank, got ", rows,
                    " x ", cols, " and ", ranks);
  const std::int64_t elements = rows * cols, of_shard = ceil_div(elements, ranks);
  std::vector<std::int64_t> cuts;
  for (std::int64_t r = 0; r <= ranks; ++r) {
    const std::int64_t at = std::min(r * of_shard, elements);
    const bool is_inside_a_byte = at < elements && at % cols % 2 == 1;
    cuts.push_back(at + (is_inside_a_byte ? 1 : 0));
  }
  return cuts;
}

// Fragments of wires side by side: specs, cols: of each wire; cuts: its (ranks + 1). For each wire: where its fragments
// begin in a rank's piece, then each rank's first and last byte of the wire. In the end: bytes of a piece.
std::vector<std::int64_t> fragment_layout(const Texts& specs, at::IntArrayRef cols,
                                          at::IntArrayRef cuts, std::int64_t ranks) {
  constexpr std::int64_t kAlignment = 16;
  TORCH_CHECK_VALUE(
      cols.size() == specs.size() && static_cast<std::int64_t>(cuts.size()) ==
                                         static_cast<std::int64_t>(specs.size()) * (ranks + 1),
      "fragment_layout: expected cols and ", ranks + 1, " cuts for each of ", specs.size(),
      " wires, got ", cols.size(), " and ", cuts.size());
  std::vector<std::int64_t> layout;
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const std::int64_t* of_wire = cuts.data() + static_cast<std::int64_t>(i) * (ranks + 1);
    std::int64_t largest = 0;
    layout.push_back(offset);
    for (std::int64_t r = 0; r < ranks; ++r) {
      const Span bytes = FlatShard{cols[i], {of_wire[r], of_wire[r + 1]}}.code_bytes(
          bits_of(bridge::parse_spec(specs[i])));
      largest = std::max(largest, bytes.size());
      layout.insert(layout.end(), {bytes.begin, bytes.end});
    }
    offset += round_up(largest, kAlignment);
  }
  layout.push_back(offset);
  return layout;
}

void register_kernels(torch::Library& m) {
  m.impl("partial_amax", partial_amax_kernel);
  m.impl("partial_cast", partial_cast_kernel);
  m.impl("quantize_master_weights", quantize_master_weights_kernel);
  m.impl("merge_fragments", merge_fragments_kernel);
  m.impl("transpose_many", transpose_many_kernel);
}

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(minifloat, CUDA, m) { register_kernels(m); }

TORCH_LIBRARY_IMPL(minifloat, Meta, m) {
  m.impl("partial_amax", [](TensorList masters, const Texts& specs, at::IntArrayRef geometry) {
    std::vector<PartialCast> casts = parse_entries("partial_amax", specs, geometry);
    return at::empty({place_amaxes(casts, nullptr)}, masters[0].options().dtype(at::kInt));
  });
  m.impl("partial_cast", [](const Tensor&, TensorList, const Texts&, at::IntArrayRef, TensorList,
                            TensorList, TensorList) {});
  m.impl("quantize_master_weights",
         [](TensorList, const Texts&, at::IntArrayRef, TensorList, TensorList, TensorList,
            const Texts&, const std::string&) {});
  m.impl("merge_fragments", [](const Tensor&, TensorList, at::IntArrayRef, std::int64_t) {});
  m.impl("transpose_many", [](TensorList, TensorList, at::IntArrayRef) {});
}

TORCH_LIBRARY_IMPL(minifloat, Autograd, m) {
  for (const char* op : {"partial_amax", "partial_cast", "quantize_master_weights",
                         "merge_fragments", "transpose_many"})
    m.impl(op, torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(minifloat, CatchAll, m) {
  m.impl("even_cuts", even_cuts);
  m.impl("fragment_layout", fragment_layout);
}

}  // namespace minifloat
