// The call before a gather: the shards of all weights of a batch to codes and tables of scales.
//
//     phase                                         launches
//     active amaxes of delayed scaling              one
//     codes and scales without a transform          those of partial_cast
//     directions under a transform                  a cast each
//     scales and codes into W's row order           one for each width of element
//     copies                                        one
#include <ATen/ATen.h>

#include <utility>

#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/history.h"
#include "ops/ops.h"
#include "sharded/gather_batch.h"

namespace minifloat::torch_ops {
namespace {

using at::Tensor;

constexpr const char* kGatherCast = "GatherBatch.cast";

Copy copy_bytes(const void* from, void* to, std::int64_t bytes) {
  return {static_cast<const std::uint8_t*>(from), static_cast<std::uint8_t*>(to), bytes, false};
}

// Returns the active amax of a direction under delayed scaling, from the layer's history (operands,
// 1 + steps).
const float* active_amax(const Tensor& history, bool columnwise, const Tensor& like) {
  bridge::check_memory(kGatherCast, "histories", history);
  bridge::check_same_device(kGatherCast, "histories", history, like);
  TORCH_CHECK_VALUE(history.scalar_type() == at::kFloat && history.dim() == 2 &&
                        history.size(0) > kDgradW && history.size(1) > 0,
                    kGatherCast, ": expected float32 histories of (operands, 1 + steps), got ",
                    history.scalar_type(), " ", history.sizes());
  return history.const_data_ptr<float>() + (columnwise ? kDgradW : kFpropW) * history.stride(0);
}

// The memory of one call, and its transposes and copies.
struct CastWork {
  Tensor like;
  std::uint8_t* inputs;
  float* common;
  Scratch scratch;
  Tensors kept = {};  // results of casts under a transform
  std::vector<Transpose> transposes = {};
  std::vector<Copy> active = {};  // amaxes of delayed scaling
  std::vector<Copy> copies = {};  // after the transposes

  std::uint8_t* codes(const PlannedCast& planned) const { return inputs + planned.codes_at; }
  std::uint8_t* table(const PlannedCast& planned) const {
    return planned.table_at < 0 ? nullptr : inputs + planned.table_at;
  }
  // Those that are common to all ranks; null: none.
  float* scale(const GatheredDirection& direction) const {
    return direction.shard.common_scales() > 0 ? common + direction.scale_at : nullptr;
  }
  float* amax(const GatheredDirection& direction) const {
    return direction.shard.common_amaxes() > 0 ? common + direction.amax_at : nullptr;
  }
};

// Adds the copies that write a direction's table, in the order of W's rows, from the scales of the
// window.
void add_table(CastWork& work, const PlannedCast& planned, std::uint8_t* scales,
               std::int64_t window_rows) {
  const RowShard& shard = planned.direction->shard;
  const std::int64_t count = shard.table_rows_of_this_rank(), row = shard.table_row_bytes();
  std::uint8_t *by_row = scales, *table = work.table(planned);
  if (shard.columnwise()) {
    const bool is_whole = count == window_rows;
    by_row = is_whole ? table : work.scratch.take(window_rows * row);
    work.transposes.push_back({.from = scales,
                               .to = by_row,
                               .rows = shard.table_cols(),
                               .cols = window_rows,
                               .bits = 8 * shard.scale_bytes()});
    if (is_whole) return;
  }
  if (count > 0)
    work.copies.push_back(copy_bytes(by_row + shard.table_first() * row, table, count * row));
}

// Points a cast without a transform at its outputs.
void place(CastWork& work, const PlannedCast& planned, PartialCast& cast,
           const Tensors& histories) {
  GatheredDirection& direction = *planned.direction;
  cast.amaxes = direction.amaxes();
  cast.codes = work.codes(planned);
  // The first cast chooses scales, and marks its choices in the packed amaxes. An empty shard has
  // no blocks.
  cast.has_chosen_scales = direction.has_chosen_scales || cast.shard.empty();
  direction.has_chosen_scales = cast.spec.reads_values();
  cast.amax = work.amax(direction);
  if (cast.spec.delayed) {
    TORCH_CHECK_VALUE(planned.weight < histories.size(), kGatherCast,
                      ": expected an amax history of each weight, got ", histories.size());
    const float* active = active_amax(histories[planned.weight], cast.columnwise, work.like);
    work.active.push_back(copy_bytes(active, cast.amax, sizeof(float)));
  }
  if (direction.shard.has_common_scale()) {
    cast.scale = work.scale(direction);
  } else if (planned.scale_bytes == 0) {
    cast.scale = work.table(planned);
  } else {
    std::uint8_t* scales = work.scratch.take(planned.scale_bytes);
    cast.scale = scales;
    add_table(work, planned, scales, planned.window_table_rows);
  }
}

// Casts a shard under a transform as if the shard were a weight, with the amax of the whole weight
// where the spec has one.
void cast_transformed(CastWork& work, const PlannedCast& planned, const Tensor& shard_values,
                      const Tensors& histories) {
  const GatheredDirection& direction = *planned.direction;
  const RowShard& shard = direction.shard;
  const Spec& spec = shard.spec();
  const bool columnwise = shard.columnwise();
  std::optional<Tensor> amax;
  if (spec.delayed) {
    TORCH_CHECK_VALUE(planned.weight < histories.size(), kGatherCast,
                      ": expected an amax history of each weight, got ", histories.size());
    active_amax(histories[planned.weight], columnwise, work.like);  // checks the history
    amax = histories[planned.weight].select(0, columnwise ? kDgradW : kFpropW).select(0, 0);
  } else if (shard.exchanged() > 0) {
    amax =
        direction.exchanged.narrow(0, direction.exchanged_at, shard.exchanged()).view(at::kFloat);
    if (spec.has_tensor_amax()) amax = amax->view(at::IntArrayRef{});
  }
  QuantizeOptions options;
  (columnwise ? options.amax_col : options.amax_row) = amax;
  auto [row, col] =
      quantize(shard_values, columnwise ? "" : spec.str(), columnwise ? spec.str() : "", options);
  const QuantizedOperand& q = columnwise ? col : row;
  const std::int64_t rows = shard.grown(shard.held_rows());
  if (rows > 0 && columnwise)
    work.transposes.push_back({.from = q.codes.const_data_ptr(),
                               .to = work.codes(planned),
                               .rows = shard.cols(),
                               .cols = rows,
                               .bits = spec.code_bits()});
  else if (rows > 0)
    work.copies.push_back(
        copy_bytes(q.codes.const_data_ptr(), work.codes(planned), shard.held_bytes()));
  if (float* scale = work.scale(direction))
    work.copies.push_back(copy_bytes(q.scale.const_data_ptr(), scale,
                                     shard.common_scales() * std::int64_t{sizeof(float)}));
  if (float* to = work.amax(direction))
    work.copies.push_back(copy_bytes(q.amax.const_data_ptr(), to,
                                     shard.common_amaxes() * std::int64_t{sizeof(float)}));
  const std::int64_t blocks = shard.table_rows_of_this_rank();
  std::uint8_t* table = work.table(planned);
  if (table && shard.has_row_table()) {
    const std::int64_t bytes = blocks * shard.table_row_bytes();
    work.copies.push_back(copy_bytes(q.scale.const_data_ptr(), table, bytes));
    work.copies.push_back(copy_bytes(q.amax.const_data_ptr(),
                                     table + shard.table_rows() * shard.table_row_bytes(), bytes));
  } else if (table && blocks > 0) {
    add_table(work, planned, static_cast<std::uint8_t*>(q.scale.mutable_data_ptr()), blocks);
  }
  for (const Tensor& t : {q.codes, q.scale, q.amax}) work.kept.push_back(t);
}

// Allocates the inputs of each weight, as views of `memory`.
std::vector<Tensors> new_inputs(const CastPlan& plan, std::size_t weights, const Tensor& like,
                                Tensor& memory) {
  memory = at::empty({plan.bytes}, like.options().dtype(at::kByte));
  for (const Span& padding : plan.padding) memory.narrow(0, padding.begin, padding.size()).zero_();
  std::vector<Tensors> found(weights);
  for (const PlannedInput& input : plan.inputs)
    found[input.weight].push_back(direct_view(memory, at::kByte, {input.bytes}, input.at));
  return found;
}

// Tells whether a direction has no amaxes yet.
bool needs_measure(const CastPlan& plan) {
  for (const PlannedCast& planned : plan.casts) {
    const GatheredDirection& direction = *planned.direction;
    TORCH_CHECK_VALUE(direction.shard.exchanged() == 0 || direction.exchanged.defined(),
                      kGatherCast, ": expected amaxes that ranks have exchanged, got none");
    if (!direction.shard.is_transformed() && !direction.packed.defined()) return true;
  }
  return false;
}

}  // namespace

std::uint8_t* Scratch::take(std::int64_t bytes) {
  if (!memory_.defined()) memory_ = at::empty({bytes_}, like_.options().dtype(at::kByte));
  std::uint8_t* found = memory_.mutable_data_ptr<std::uint8_t>() + used_;
  used_ += size_of(bytes);
  return found;
}

std::vector<Tensors> GatherBatch::cast(std::int64_t selection, bool is_measured) {
  const CastPlan& plan = this->plan(selection, kBackward);
  const at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(is_measured || plan.exchanged == 0, kGatherCast,
                    ": expected amaxes that ranks have exchanged, got none");
  const Tensors shards = readable_shards();
  const Tensor& like = shards[0];
  for (const Tensor& history : histories_) bridge::check_memory(kGatherCast, "histories", history);
  if (!is_measured || needs_measure(plan)) measure_alone(shards, plan);
  if (!common_.defined() || common_.device() != like.device())
    common_ = at::zeros({common_size_}, like.options().dtype(at::kFloat));
  Tensor memory;
  std::vector<Tensors> inputs = new_inputs(plan, weights_.size(), like, memory);
  std::vector<PartialCast> casts = untransformed_casts(shards, plan);
  CastWork work = {.like = like,
                   .inputs = memory.mutable_data_ptr<std::uint8_t>(),
                   .common = common_.mutable_data_ptr<float>(),
                   .scratch = Scratch(like, plan.scratch_bytes)};
  std::size_t cast = 0;
  for (const PlannedCast& planned : plan.casts)
    if (!planned.direction->shard.is_transformed()) place(work, planned, casts[cast++], histories_);
  run_copies(work.active, like);
  if (!casts.empty())
    bridge::with_value_errors(
        [&] { partial_cast(casts, bridge::backend_of(like), bridge::ExecutionOn(like)); });
  for (const PlannedCast& planned : plan.casts) {
    if (!planned.direction->shard.is_transformed()) continue;
    const DType compute = planned.direction->shard.window().compute();
    const auto dtype = compute == DType::kBFloat16 ? at::kBFloat16 : at::kFloat;
    cast_transformed(work, planned, shards[planned.weight].to(dtype), histories_);
  }
  run_transposes(work.transposes, like);
  run_copies(work.copies, like);
  return inputs;
}

}  // namespace minifloat::torch_ops
