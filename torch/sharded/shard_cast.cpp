#include "sharded/shard_cast.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "ops/bridge.h"
#include "ops/outputs.h"

namespace minifloat::torch_ops {
namespace {

using at::Tensor;

// The alignment of each cast's amaxes, in numbers, for reads of 16 bytes.
constexpr std::int64_t kAligned = 4;

AmaxGrid grid_of(const PartialCast& cast) {
  return amax_grid(cast.spec, cast.columnwise, cast.rows, cast.cols);
}

std::int64_t packed_amaxes_of(const PartialCast& cast) {
  return round_up(grid_of(cast).count(), kAligned);
}

void check_amax(const char* op, const ShardCast& description, const Tensor& amax) {
  const Spec& spec = description.spec();
  const std::int64_t count = description.amaxes();
  const bool is_absent = amax.numel() == 0 && !spec.delayed;
  TORCH_CHECK_VALUE(is_absent || (amax.scalar_type() == at::kFloat && amax.is_contiguous() &&
                                  amax.numel() == count),
                    op, ": expected ", count, " contiguous float32 amaxes for ", spec.str(), " of ",
                    description.rows(), " x ", description.cols(), ", got ", amax.numel(), " of ",
                    amax.scalar_type(), " with strides ", amax.strides());
  bridge::check_memory(op, "amax", amax);
}

}  // namespace

// ---- Descriptions -------------------------------------------------------------------------------
ShardCast::ShardCast(const Spec& spec, bool columnwise, std::int64_t rows, std::int64_t cols,
                     DType compute)
    : spec_(spec), columnwise_(columnwise), rows_(rows), cols_(cols), compute_(compute) {
  TORCH_CHECK_VALUE(
      is_addressable({rows, cols}),
      "a cast of masters: expected sizes of zero or more, 2^48 elements at most, got ", rows, " x ",
      cols);
}

ShardCast::ShardCast(const std::string& spec, bool columnwise, std::int64_t rows, std::int64_t cols,
                     bool rounds_to_bf16)
    : ShardCast(bridge::parse_spec(spec), columnwise, rows, cols,
                rounds_to_bf16 ? DType::kBFloat16 : DType::kFloat32) {}

std::int64_t ShardCast::packed_amaxes() const { return packed_amaxes_of(describe()); }

std::int64_t ShardCast::scales() const {
  return std::max<std::int64_t>(grid_of(describe()).cells(), spec_.rule == ScaleRule::kTensor);
}

std::int64_t ShardCast::amaxes() const {
  if (spec_.has_tensor_amax()) return 1;
  return spec_.has_row_amax() ? (columnwise_ ? cols_ : rows_) : 0;
}

std::int64_t ShardCast::code_bytes() const {
  return rows_ * ceil_div<std::int64_t>(cols_ * spec_.code_bits(), 8);
}

PartialCast ShardCast::describe() const {
  PartialCast cast;
  cast.spec = spec_;
  cast.columnwise = columnwise_;
  cast.rows = rows_, cast.cols = cols_;
  cast.compute = compute_;
  return cast;
}

std::vector<Tensor> ShardCast::new_operand(const Tensor& like) const {
  bridge::check_memory("ShardCast.new_operand", "like", like);
  const std::int64_t rows = columnwise_ ? cols_ : rows_, cols = columnwise_ ? rows_ : cols_;
  std::vector<std::int64_t> scales, amaxes = {0};
  if (spec_.has_row_amax()) scales = amaxes = {rows};
  if (spec_.has_tensor_amax()) amaxes = {};
  if (spec_.has_blocks()) scales = {spec_.scale_rows(rows), spec_.scale_cols(cols)};
  const auto options = like.options();
  return {at::empty({rows, spec_.code_cols(cols)}, options.dtype(at::kByte)),
          at::empty(scales, options.dtype(scale_dtype(spec_))),
          at::empty(amaxes, options.dtype(at::kFloat))};
}

// ---- Memory -------------------------------------------------------------------------------------
void place_shard(const char* op, PartialCast& cast, const Tensor& master, std::int64_t start,
                 const Tensor& like) {
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

void place_outputs(const char* op, const ShardCast& description, PartialCast& cast,
                   const CastOutputs& outputs, const Tensor& like) {
  const auto& [codes, is_fragment, scale, amax] = outputs;
  const Span bytes = FlatShard{cast.cols, cast.shard}.code_bytes(cast.spec.code_bits());
  const std::int64_t expected = is_fragment ? bytes.size() : description.code_bytes();
  TORCH_CHECK_VALUE(codes.element_size() == 1 && codes.is_contiguous() && codes.numel() == expected,
                    op, ": expected ", expected, " contiguous bytes for ",
                    is_fragment ? "the fragment of " : "the codes of ", cast.spec.str(),
                    " elements [", cast.shard.begin, ", ", cast.shard.end, ") of ", cast.rows,
                    " x ", cast.cols, ", got ", codes.numel(), " of ", codes.scalar_type());
  const std::int64_t of_scales = description.scales();
  TORCH_CHECK_VALUE(is_scale_dtype(scale.scalar_type(), cast.spec) && scale.is_contiguous() &&
                        scale.numel() == of_scales,
                    op, ": expected ", of_scales, " contiguous scales of ", scale_dtype(cast.spec),
                    " for ", cast.spec.str(), " of ", cast.rows, " x ", cast.cols, ", got ",
                    scale.numel(), " of ", scale.scalar_type());
  check_amax(op, description, amax);
  bridge::check_memory(op, "codes", codes);
  bridge::check_memory(op, "scale", scale);
  for (const Tensor* t : {&codes, &scale, &amax})
    bridge::check_same_device(op, "codes, scales and amax", *t, like);
  cast.codes = static_cast<std::uint8_t*>(codes.mutable_data_ptr());
  cast.first_byte = is_fragment ? bytes.begin : 0;
  cast.keeps_other_nibbles = !is_fragment;
  cast.scale = scale.mutable_data_ptr();
  cast.amax = amax.numel() > 0 ? amax.mutable_data_ptr<float>() : nullptr;
}

std::int64_t place_amaxes(std::vector<PartialCast>& casts, std::uint32_t* packed) {
  std::int64_t count = 0;
  for (PartialCast& cast : casts) {
    if (packed) cast.amaxes = packed + count;
    count += packed_amaxes_of(cast);
  }
  return count;
}

bool any_reads_values(const std::vector<PartialCast>& casts) {
  return std::any_of(casts.begin(), casts.end(),
                     [](const PartialCast& cast) { return cast.spec.reads_values(); });
}

Tensor measure_amaxes(std::vector<PartialCast>& casts, const Tensor& like) {
  const Tensor packed = at::zeros({place_amaxes(casts, nullptr)}, like.options().dtype(at::kInt));
  place_amaxes(casts, reinterpret_cast<std::uint32_t*>(packed.mutable_data_ptr<std::int32_t>()));
  bridge::with_value_errors(
      [&] { partial_amax(casts, bridge::backend_of(like), bridge::ExecutionOn(like)); });
  return packed;
}

// ---- Transposes and copies ----------------------------------------------------------------------
Transpose transpose_of(const Tensor& from, const Tensor& to, const std::int64_t* sizes,
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

void run_transposes(const std::vector<Transpose>& jobs, const Tensor& like) {
  if (jobs.empty()) return;
  bridge::with_value_errors(
      [&] { transpose_many(jobs, bridge::backend_of(like), bridge::ExecutionOn(like)); });
}

void run_copies(const std::vector<Copy>& copies, const Tensor& like) {
  if (copies.empty()) return;
  bridge::with_value_errors(
      [&] { copy_many(copies, bridge::backend_of(like), bridge::ExecutionOn(like)); });
}

}  // namespace minifloat::torch_ops
