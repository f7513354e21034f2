// Quantized weights from sharded masters: the kernels of minifloat/partial_cast.h over lists of tensors, with the one
// all-reduce between them.
//
//     masters -> partial_amax -> packed int32 amaxes -> all-reduce MAX -> partial_cast -> codes, scales, amax
//
// An entry of the lists is one direction of one weight. Its numbers (`geometry`): columnwise, rows, cols, whether the
// compute dtype is bf16, the shard's first element, and whether codes are the shard's own fragment of the wire.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <initializer_list>

#include "ops/bridge.h"
#include "ops/outputs.h"
#include "sharded/master_weights.h"
#include "sharded/rank_agreement.h"

namespace minifloat {
namespace {

using at::Tensor;
using at::TensorList;
using torch_ops::is_scale_dtype;
using torch_ops::scale_dtype;
using torch_ops::Texts;

constexpr std::int64_t kNumbers = 6;  // an entry's
// Every entry's amaxes start at a multiple of this many, so that they may be read 16 bytes at a time.
constexpr std::int64_t kAligned = 4;

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

bool any_reads_values(const std::vector<PartialCast>& casts) {
  return std::any_of(casts.begin(), casts.end(),
                     [](const PartialCast& cast) { return cast.spec.reads_values(); });
}

std::int64_t scales_in(const PartialCast& cast) {
  const AmaxGrid grid = amax_grid(cast.spec, cast.columnwise, cast.rows, cast.cols);
  return std::max<std::int64_t>(grid.cells(), cast.spec.rule == ScaleRule::kTensor);
}

// How many numbers the amax of a cast has: as read, of its tensor or rows.
std::int64_t amax_count(const PartialCast& cast) {
  if (cast.spec.has_tensor_amax()) return 1;
  return cast.spec.has_row_amax() ? (cast.columnwise ? cast.cols : cast.rows) : 0;
}

void check_amax(const char* op, const PartialCast& cast, const Tensor& amax) {
  const std::int64_t count = amax_count(cast);
  const bool is_absent = amax.numel() == 0 && !cast.spec.delayed;
  TORCH_CHECK_VALUE(is_absent || (amax.scalar_type() == at::kFloat && amax.is_contiguous() &&
                                  amax.numel() == count),
                    op, ": expected ", count, " contiguous float32 amaxes for ", cast.spec.str(),
                    " of ", cast.rows, " x ", cast.cols, ", got ", amax.numel(), " of ",
                    amax.scalar_type(), " with strides ", amax.strides());
  bridge::check_memory(op, "amax", amax);
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
  TORCH_CHECK_VALUE(
      is_addressable({cast.rows, cast.cols}),
      "a cast of masters: expected sizes of zero or more, 2^48 elements at most, got ", cast.rows,
      " x ", cast.cols);
  cast.compute = numbers[3] ? DType::kBFloat16 : DType::kFloat32;
  return cast;
}

void torch_ops::place_shard(const char* op, PartialCast& cast, const Tensor& master,
                            std::int64_t start, const Tensor& like) {
  const bool is_fp32 = master.scalar_type() == at::kFloat;
  bridge::check_value_dtype(op, "masters", master);
  bridge::check_memory(op, "masters", master);
  TORCH_CHECK_VALUE(master.is_contiguous(), op,
                    ": expected flat, contiguous shards of masters, got strides ",
                    master.strides());
  bridge::check_same_device(op, "masters", master, like);
  const std::int64_t elements = cast.rows * cast.cols, held = master.numel();
  TORCH_CHECK_VALUE(held == 0 || (0 <= start && start <= elements - held), op,
                    ": expected a shard within the ", elements, " elements of the weight, got ",
                    held, " from ", start, " on");
  if (held == 0) start = 0;
  cast.shard = {start, start + master.numel()};
  cast.master = master.const_data_ptr();
  cast.dtype = is_fp32 ? DType::kFloat32 : DType::kBFloat16;
}

void torch_ops::place_outputs(const char* op, PartialCast& cast, const CastOutputs& outputs,
                              const Tensor& like) {
  const auto& [codes, is_fragment, scale, amax] = outputs;
  const Span bytes = FlatShard{cast.cols, cast.shard}.code_bytes(cast.spec.code_bits());
  const std::int64_t wanted =
      is_fragment ? bytes.size()
                  : cast.rows * ceil_div<std::int64_t>(cast.cols * cast.spec.code_bits(), 8);
  TORCH_CHECK_VALUE(codes.element_size() == 1 && codes.is_contiguous() && codes.numel() == wanted,
                    op, ": expected ", wanted, " contiguous bytes for ",
                    is_fragment ? "the fragment of " : "the codes of ", cast.spec.str(),
                    " elements [", cast.shard.begin, ", ", cast.shard.end, ") of ", cast.rows,
                    " x ", cast.cols, ", got ", codes.numel(), " of ", codes.scalar_type());
  const std::int64_t of_scales = scales_in(cast);
  TORCH_CHECK_VALUE(is_scale_dtype(scale.scalar_type(), cast.spec) && scale.is_contiguous() &&
                        scale.numel() == of_scales,
                    op, ": expected ", of_scales, " contiguous scales of ", scale_dtype(cast.spec),
                    " for ", cast.spec.str(), " of ", cast.rows, " x ", cast.cols, ", got ",
                    scale.numel(), " of ", scale.scalar_type());
  check_amax(op, cast, amax);
  bridge::check_memory(op, "codes", codes);
  bridge::check_memory(op, "scale", scale);
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
  if (ranks && any_reads_values(casts)) {
    bridge::with_value_errors(
        [&] { choose_scales(casts, bridge::backend_of(packed), bridge::ExecutionOn(packed)); });
    all_reduce_max(ranks, packed);
    for (PartialCast& cast : casts) cast.has_chosen_scales = true;
  }
  bridge::with_value_errors(
      [&] { partial_cast(casts, bridge::backend_of(packed), bridge::ExecutionOn(packed)); });
}

Transpose torch_ops::transpose_of(const Tensor& from, const Tensor& to, const std::int64_t* sizes,
                                  const Tensor& like) {
  constexpr const char* kOp = "transpose_many";
  const std::int64_t rows = sizes[0], cols = sizes[1], bits = sizes[2];
  TORCH_CHECK_VALUE(is_addressable({rows, cols}), kOp,
                    ": expected sizes of zero or more, 2^48 elements at most, got ", rows, " x ",
                    cols);
  TORCH_CHECK_VALUE(bits == 4 || bits == 8 || bits == 32, kOp,
                    ": expected elements of 4, 8 or 32 bits, got ", bits);
  const auto bytes = [&](std::int64_t r, std::int64_t c) {
    return r * ceil_div<std::int64_t>(c * bits, 8);
  };
  bridge::check_bytes(kOp, "a matrix", from, bytes(rows, cols));
  bridge::check_bytes(kOp, "a transpose", to, bytes(cols, rows));
  for (const Tensor* t : {&from, &to})
    TORCH_CHECK_VALUE(bits != 32 || reinterpret_cast<std::uintptr_t>(t->const_data_ptr()) % 4 == 0,
                      kOp, ": expected elements of 32 bits at multiples of 4 bytes");
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

void partial_cast_kernel(const Tensor& given, TensorList masters, const Texts& specs,
                         at::IntArrayRef geometry, TensorList codes, TensorList scales,
                         TensorList amaxes) {
  std::vector<PartialCast> casts = parse_shards("partial_cast", masters, specs, geometry);
  const Tensor packed = any_reads_values(casts) ? given.clone() : given;  // choices overwrite them
  const std::int64_t count = place_amaxes(casts, nullptr);
  TORCH_CHECK_VALUE(
      packed.scalar_type() == at::kInt && packed.is_contiguous() && packed.numel() == count,
      "partial_cast: expected ", count, " packed int32 amaxes, got ", packed.numel(), " of ",
      packed.scalar_type());
  bridge::check_memory("partial_cast", "amaxes", packed);
  if (!masters.empty()) bridge::check_same_device("partial_cast", "masters", masters[0], packed);
  if (!codes.empty()) bridge::check_same_device("partial_cast", "codes", codes[0], packed);
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

void register_kernels(torch::Library& m) {
  m.impl("partial_amax", partial_amax_kernel);
  m.impl("partial_cast", partial_cast_kernel);
  m.impl("quantize_master_weights", quantize_master_weights_kernel);
  m.impl("transpose_many", transpose_many_kernel);
}

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(minifloat, CUDA, m) { register_kernels(m); }

TORCH_LIBRARY_IMPL(minifloat, Meta, m) {
  m.impl("partial_amax", [](TensorList masters, const Texts& specs, at::IntArrayRef geometry) {
    TORCH_CHECK_VALUE(!masters.empty(), "partial_amax: expected at least one weight, got none");
    bridge::check_one_device("partial_amax", {masters});
    std::vector<PartialCast> casts = parse_entries("partial_amax", specs, geometry);
    return at::empty({place_amaxes(casts, nullptr)}, masters[0].options().dtype(at::kInt));
  });
  m.impl("partial_cast", [](const Tensor& amaxes, TensorList masters, const Texts&, at::IntArrayRef,
                            TensorList codes, TensorList scales, TensorList amax) {
    bridge::check_one_device("partial_cast", {amaxes, masters, codes, scales, amax});
  });
  m.impl("quantize_master_weights",
         [](TensorList masters, const Texts&, at::IntArrayRef, TensorList codes, TensorList scales,
            TensorList amax, const Texts&, const std::string&) {
           bridge::check_one_device("quantize_master_weights", {masters, codes, scales, amax});
         });
  m.impl("transpose_many", [](TensorList from, TensorList to, at::IntArrayRef) {
    bridge::check_one_device("transpose_many", {from, to});
  });
}

TORCH_LIBRARY_IMPL(minifloat, Autograd, m) {
  for (const char* op :
       {"partial_amax", "partial_cast", "quantize_master_weights", "transpose_many"})
    m.impl(op, torch::CppFunction::makeFallthrough());
}

}  // namespace minifloat
