// Quantized weights from sharded masters: the kernels of minifloat/partial_cast.h over lists of
// tensors, with the all-reduce between the kernels.
//
//     masters -> partial_amax -> packed int32 amaxes
//             -> all-reduce MAX
//             -> partial_cast -> codes, scales, amax
//
// An entry of the lists is one direction of one weight. `geometry` has six numbers for each entry:
// columnwise, rows, cols, whether the compute dtype is bf16, the shard's first element, and whether
// the codes are the shard's fragment of the flat codes.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "ops/bridge.h"
#include "sharded/quantize_masters.h"
#include "sharded/shard_cast.h"

namespace minifloat {
namespace {

using at::Tensor;
using at::TensorList;
using torch_ops::ShardCast;
using torch_ops::Texts;

constexpr std::int64_t kNumbers = 6;  // of an entry in `geometry`

ShardCast description_of(const std::string& spec, const std::int64_t* numbers) {
  return ShardCast(spec, numbers[0] != 0, numbers[1], numbers[2], numbers[3] != 0);
}

// Returns the casts that specs and geometry describe, without memory.
std::vector<PartialCast> parse_entries(const char* op, const Texts& specs,
                                       at::IntArrayRef geometry) {
  TORCH_CHECK_VALUE(geometry.size() == specs.size() * kNumbers, op, ": expected ", kNumbers,
                    " numbers for each of ", specs.size(), " specs, got ", geometry.size());
  std::vector<PartialCast> casts;
  casts.reserve(specs.size());
  for (std::size_t i = 0; i < specs.size(); ++i)
    casts.push_back(description_of(specs[i], geometry.data() + i * kNumbers).describe());
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

void place_all_outputs(const char* op, std::vector<PartialCast>& casts, const Texts& specs,
                       at::IntArrayRef geometry, TensorList codes, TensorList scales,
                       TensorList amaxes) {
  TORCH_CHECK_VALUE(codes.size() == casts.size() && scales.size() == casts.size() &&
                        amaxes.size() == casts.size(),
                    op, ": expected codes, scale and amax of each of ", casts.size(), " specs");
  for (std::size_t i = 0; i < casts.size(); ++i) {
    const std::int64_t* numbers = geometry.data() + i * kNumbers;
    torch_ops::place_outputs(op, description_of(specs[i], numbers), casts[i],
                             {codes[i], numbers[5] != 0, scales[i], amaxes[i]}, codes[0]);
  }
}

// ---- Ops ----------------------------------------------------------------------------------------
Tensor partial_amax_kernel(TensorList masters, const Texts& specs, at::IntArrayRef geometry) {
  TORCH_CHECK_VALUE(!masters.empty(), "partial_amax: expected at least one weight, got none");
  std::vector<PartialCast> casts = parse_shards("partial_amax", masters, specs, geometry);
  return torch_ops::measure_amaxes(casts, masters[0]);
}

void partial_cast_kernel(const Tensor& reduced, TensorList masters, const Texts& specs,
                         at::IntArrayRef geometry, TensorList codes, TensorList scales,
                         TensorList amaxes) {
  std::vector<PartialCast> casts = parse_shards("partial_cast", masters, specs, geometry);
  const bool is_overwritten = torch_ops::any_reads_values(casts);  // by the choices of scales
  const Tensor packed = is_overwritten ? reduced.clone() : reduced;
  const std::int64_t count = torch_ops::place_amaxes(casts, nullptr);
  TORCH_CHECK_VALUE(
      packed.scalar_type() == at::kInt && packed.is_contiguous() && packed.numel() == count,
      "partial_cast: expected ", count, " packed int32 amaxes, got ", packed.numel(), " of ",
      packed.scalar_type());
  bridge::check_memory("partial_cast", "amaxes", packed);
  if (!masters.empty()) bridge::check_same_device("partial_cast", "masters", masters[0], packed);
  if (!codes.empty()) bridge::check_same_device("partial_cast", "codes", codes[0], packed);
  torch_ops::place_amaxes(
      casts, reinterpret_cast<std::uint32_t*>(packed.mutable_data_ptr<std::int32_t>()));
  place_all_outputs("partial_cast", casts, specs, geometry, codes, scales, amaxes);
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
  place_all_outputs(kOp, casts, specs, geometry, codes, scales, amaxes);
  TORCH_CHECK_VALUE(names.size() == casts.size(), kOp, ": expected a name for each of ",
                    casts.size(), " specs, got ", names.size());
  bridge::check_same_device(kOp, "masters", masters[0], codes[0]);
  torch_ops::Agreement agreement;
  torch_ops::quantize_masters(kOp, casts, names, group, agreement, codes[0]);
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
    return at::empty({torch_ops::place_amaxes(casts, nullptr)},
                     masters[0].options().dtype(at::kInt));
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
