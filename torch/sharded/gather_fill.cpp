// The call after a gather: gathered codes and tables to both directions of all weights of a batch.
//
//     phase                                               launches
//     codes, scales and amaxes that are copied            one
//     transposes of codes, and of columnwise scales       one for each width of element
#include <ATen/ATen.h>

#include <span>

#include "ops/bridge.h"
#include "sharded/gather_batch.h"

namespace minifloat::torch_ops {
namespace {

using at::Tensor;

constexpr const char* kGatherFill = "GatherBatch.fill";
constexpr std::size_t kTargets = 6;  // of a weight

// Frees the memory of a tensor, not the tensor: an op that reads the tensor raises an error that
// names the missing gather.
void free_memory(const Tensor& t) {
  c10::StorageImpl* storage = t.storage().unsafeGetStorageImpl();
  if (storage->nbytes() == 0) return;
  storage->set_data_ptr_noswap(at::DataPtr(nullptr, t.device()));
  storage->set_nbytes(0);
}

// Allocates the storage of a tensor whose memory was freed. bytes: of the storage, which the tensor
// begins
void allocate_memory(const Tensor& t, std::size_t bytes) {
  c10::StorageImpl* storage = t.storage().unsafeGetStorageImpl();
  if (storage->nbytes() > 0 || t.nbytes() == 0) return;
  const c10::OptionalDeviceGuard guard(t.device());
  storage->set_data_ptr_noswap(storage->allocator()->allocate(bytes));
  storage->set_nbytes(bytes);
}
void allocate_memory(const Tensor& t) { allocate_memory(t, t.nbytes()); }

// The targets of one direction of a weight.
struct Target {
  const Tensor &codes, &scale, &amax;
};

// The copies and transposes of a call.
struct FillWork {
  Tensor like;
  const float* common;
  Scratch scratch;
  std::vector<Copy> copies = {};
  std::vector<Transpose> transposes = {};
  Tensors freed = {};  // FSDP2's memory, once the transposes have read it

  void copy(const void* from, void* to, std::int64_t bytes) {
    if (from == to || bytes == 0) return;
    copies.push_back(
        {static_cast<const std::uint8_t*>(from), static_cast<std::uint8_t*>(to), bytes, false});
  }
};

// The gathered codes and tables of one direction; `stride`: bytes from one rank's table to the next
// rank's.
struct Sent {
  const GatheredDirection& direction;
  const std::uint8_t* codes;
  const std::uint8_t* tables;
  std::int64_t stride;
};

// The bytes of the tensors that one direction fills; amax: 0: it fills none.
struct TargetBytes {
  std::int64_t codes, scale, amax;
};

TargetBytes target_bytes(const RowShard& shard, bool is_columnwise) {
  constexpr std::int64_t kFloatBytes = sizeof(float);
  const std::int64_t rows = shard.grown(shard.rows()), bits = shard.spec().code_bits();
  const std::int64_t table = shard.whole_table_rows() * shard.table_row_bytes();
  return {
      is_columnwise ? shard.cols() * ceil_div<std::int64_t>(rows * bits, 8) : shard.whole_bytes(),
      shard.has_common_scale() ? shard.common_scales() * kFloatBytes : table,
      shard.has_row_table() ? table : shard.common_amaxes() * kFloatBytes};
}

// Requires a dense, contiguous tensor of these bytes. Its memory may be freed.
void check_target(const Tensor& t, std::int64_t bytes, const char* name, const Tensor& first) {
  bridge::check_same_device(kGatherFill, "targets", t, first);
  TORCH_CHECK_VALUE((t.is_cpu() || t.is_cuda()) && t.layout() == at::kStrided && t.has_storage(),
                    kGatherFill, ": expected dense tensors on the CPU or CUDA, got ", t.layout(),
                    " on ", t.device());
  TORCH_CHECK_VALUE(t.is_contiguous() && static_cast<std::int64_t>(t.nbytes()) == bytes,
                    kGatherFill, ": expected ", bytes, " contiguous bytes of ", name, ", got ",
                    t.nbytes(), " with strides ", t.strides());
}

// Returns the memory of a held target, which FSDP2 may have freed since.
std::uint8_t* memory_of(const FillWork& work, const Tensor& t, std::int64_t bytes,
                        const char* name) {
  const c10::Storage& storage = t.unsafeGetTensorImpl()->unsafe_storage();
  const auto begin = t.storage_offset() * static_cast<std::int64_t>(t.element_size());
  const auto held = static_cast<std::int64_t>(storage.nbytes());
  TORCH_CHECK_VALUE(begin + bytes <= held && (storage.data() || bytes == 0) &&
                        storage.device() == work.like.device(),
                    kGatherFill, ": expected ", name, " in memory on ", work.like.device(), ", ",
                    begin + bytes, " bytes of its storage, got ", held, " on ", storage.device(),
                    ": its memory is freed, or was moved");
  return static_cast<std::uint8_t*>(storage.mutable_data()) + begin;
}

// Adds the copies of all ranks' tables into one table, in the order of W's rows.
void join_tables(FillWork& work, const Sent& sent, std::int64_t skip, std::uint8_t* to) {
  const RowShard& shard = sent.direction.shard;
  for (std::int64_t rank = 0; rank < shard.world(); ++rank) {
    const std::int64_t bytes = shard.table_rows_of(rank) * shard.table_row_bytes();
    work.copy(sent.tables + rank * sent.stride + skip, to, bytes);
    to += bytes;
  }
}

// Adds the transpose of a table in the order of W's rows to columnwise scales.
void transpose_table(FillWork& work, const RowShard& shard, const void* from, void* to) {
  work.transposes.push_back({.from = from,
                             .to = to,
                             .rows = shard.whole_table_rows(),
                             .cols = shard.table_cols(),
                             .bits = 8 * shard.scale_bytes()});
}

// row: the targets of the other direction, which are filled; null: they are not. Both directions
// may have one tensor.
void fill_scales(FillWork& work, const Sent& sent, const Target& target, bool is_transposed,
                 const Target* row) {
  const RowShard& shard = sent.direction.shard;
  const auto [codes, bytes, amax_bytes] = target_bytes(shard, is_transposed);
  if (amax_bytes > 0 && !shard.has_row_table() && !(row && row->amax.is_same(target.amax)))
    work.copy(work.common + sent.direction.amax_at,
              memory_of(work, target.amax, amax_bytes, "amax"), amax_bytes);
  if (row && row->scale.is_same(target.scale)) return;
  std::uint8_t* scale = memory_of(work, target.scale, bytes, "scale");
  if (shard.has_row_table()) {
    join_tables(work, sent, 0, scale);
    join_tables(work, sent, shard.table_rows() * shard.table_row_bytes(),
                memory_of(work, target.amax, amax_bytes, "amax"));
  } else if (shard.has_common_scale()) {
    work.copy(work.common + sent.direction.scale_at, scale, bytes);
  } else if (is_transposed) {
    std::uint8_t* by_row = work.scratch.take(bytes);
    join_tables(work, sent, 0, by_row);
    transpose_table(work, shard, by_row, scale);
  } else {
    join_tables(work, sent, 0, scale);
  }
}

void fill_codes(FillWork& work, const Sent& sent, const Target& target, bool is_columnwise) {
  const RowShard& shard = sent.direction.shard;
  const std::int64_t bytes = target_bytes(shard, is_columnwise).codes;
  std::uint8_t* codes = memory_of(work, target.codes, bytes, "codes");
  if (!is_columnwise) return work.copy(sent.codes, codes, bytes);
  work.transposes.push_back({.from = sent.codes,
                             .to = codes,
                             .rows = shard.grown(shard.rows()),
                             .cols = shard.cols(),
                             .bits = static_cast<int>(shard.spec().code_bits())});
}

// The directions of a weight that a gather fills, and whether it keeps the rowwise codes.
struct Filled {
  bool row, col, keeps_row;
};

Filled filled_by(const BatchedWeight& weight, std::int64_t selection, bool forward_alone,
                 bool keeps_row) {
  const bool is_backward = selection == kBackward;
  if (weight.mode == GatherMode::kSplit) return {!is_backward, is_backward, !is_backward};
  return {true, weight.directions[0].shard.is_transformed() || !forward_alone,
          weight.mode == GatherMode::kBoth || !is_backward || keeps_row};
}

// Fills the directions of a weight. Frees the memory of a direction that the gather does not fill.
// FSDP2's memory holds the rowwise codes, or what the columnwise ones are transposed from. targets:
// the six of the weight; sent: the weight's selected directions; is_fetch: whether one weight is
// gathered alone, so that nothing is freed
void fill_weight(FillWork& work, std::span<const Sent> sent, const Tensor* targets,
                 const Filled& filled, bool is_fetch) {
  const Target row = {targets[0], targets[1], targets[2]};
  const Target col = {targets[3], targets[4], targets[5]};
  if (!filled.row && !is_fetch) free_memory(row.scale);
  if (!filled.keeps_row && !is_fetch) work.freed.push_back(row.codes);
  if (!filled.col && !is_fetch) free_memory(col.codes);
  if (filled.row) {
    const RowShard& shard = sent.front().direction.shard;
    allocate_memory(row.scale);
    if (is_fetch) allocate_memory(row.codes, shard.world() * shard.chunk_bytes());
    fill_codes(work, sent.front(), row, false);
    fill_scales(work, sent.front(), row, false, nullptr);
  }
  if (filled.col) {
    allocate_memory(col.scale);
    if (is_fetch) allocate_memory(col.codes);
    fill_codes(work, sent.back(), col, true);
    fill_scales(work, sent.back(), col, true, filled.row ? &row : nullptr);
  }
}

}  // namespace

void GatherBatch::hold_targets(Tensors targets) {
  TORCH_CHECK_VALUE(targets.size() == kTargets * weights_.size(), kGatherFill, ": expected ",
                    kTargets * weights_.size(), " targets, got ", targets.size());
  for (std::size_t i = 0; i < targets.size(); i += kTargets / 2) {
    const bool is_columnwise = i % kTargets > 0;
    const std::vector<GatheredDirection>& directions = weights_[i / kTargets].directions;
    const RowShard& shard = (is_columnwise ? directions.back() : directions.front()).shard;
    const TargetBytes bytes = target_bytes(shard, is_columnwise);
    check_target(targets[i], bytes.codes, "codes", targets[0]);
    check_target(targets[i + 1], bytes.scale, "scale", targets[0]);
    if (bytes.amax > 0) check_target(targets[i + 2], bytes.amax, "amax", targets[0]);
  }
  targets_ = std::move(targets);
}

// Returns the held outputs where the given ones are the last of them, else the given ones.
const Tensors& GatherBatch::outputs_with(const Tensors& given) const {
  if (given.empty() || given.size() >= outputs_.size()) return given;
  const Tensor &last = given.back(), &held = outputs_.back();
  TORCH_CHECK_VALUE(last.is_alias_of(held), kGatherFill,
                    ": expected outputs in the memory that is held, got other memory: FSDP2 is to "
                    "gather into the same memory each time");
  return outputs_;
}

void GatherBatch::fill(const Tensors& given, std::int64_t selection, std::int64_t weight,
                       bool forward_alone, bool keeps_row) {
  plan(selection, kBackward);  // checks it
  const auto count = static_cast<std::int64_t>(weights_.size());
  const bool is_fetch = weight != kAllWeights;
  const Tensors& outputs = is_fetch ? given : outputs_with(given);
  TORCH_CHECK_VALUE(kAllWeights <= weight && weight < count, kGatherFill,
                    ": expected a weight from -1 to ", count, ", got ", weight);
  TORCH_CHECK_VALUE(!targets_.empty() && !outputs.empty(), kGatherFill, ": expected targets of ",
                    count, " weights, and what ranks sent, got ", targets_.size(), " and ",
                    outputs.size(), " tensors");
  TORCH_CHECK_VALUE(common_.defined() || common_size_ == 0, kGatherFill,
                    ": expected shards that were cast");
  bridge::check_same_device(kGatherFill, "tensors", common_, outputs[0]);
  const std::int64_t first = is_fetch ? weight : 0, end = is_fetch ? weight + 1 : count;

  std::vector<Sent> sent;
  auto output = outputs.begin();
  const auto next_output = [&](std::int64_t bytes, const char* name) {
    TORCH_CHECK_VALUE(output != outputs.end(), kGatherFill, ": expected the codes and tables of ",
                      end - first, " weights, got ", outputs.size(), " tensors");
    bridge::check_same_device(kGatherFill, "tensors", *output, outputs[0]);
    bridge::check_bytes(kGatherFill, name, *output, bytes);
    return static_cast<const std::uint8_t*>((output++)->const_data_ptr());
  };
  for (std::int64_t i = first; i < end; ++i) {
    const auto& [directions, starts] = weights_[i].selections[selection];
    const std::size_t begin = sent.size();
    for (const GatheredDirection* direction : directions) {
      const RowShard& shard = direction->shard;
      sent.push_back({.direction = *direction,
                      .codes = next_output(shard.world() * shard.chunk_bytes(), "codes"),
                      .tables = nullptr,
                      .stride = weights_[i].table_bytes});
    }
    if (weights_[i].table_bytes == 0) continue;
    const std::int64_t world = directions[0]->shard.world();
    const std::uint8_t* tables = next_output(world * weights_[i].table_bytes, "tables");
    for (std::size_t k = 0; k < directions.size(); ++k) sent[begin + k].tables = tables + starts[k];
  }

  FillWork work = {.like = outputs[0],
                   .common = common_size_ > 0 ? common_.const_data_ptr<float>() : nullptr,
                   .scratch = Scratch(outputs[0], join_bytes_)};
  std::span<const Sent> rest = sent;
  for (std::int64_t i = first; i < end; ++i) {
    const std::size_t directions = weights_[i].selections[selection].directions.size();
    fill_weight(work, rest.first(directions), targets_.data() + kTargets * i,
                filled_by(weights_[i], selection, forward_alone, keeps_row), is_fetch);
    rest = rest.subspan(directions);
  }
  run_copies(work.copies, work.like);
  run_transposes(work.transposes, work.like);
  for (const Tensor& t : work.freed) free_memory(t);
  if (common_.defined() && common_.is_cuda()) {
    // FSDP2's stream of casts allocated it, and may have its memory again once the batch is gone.
    const c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
    common_.record_stream(cuda.getStream(common_.device()));
  }
}

}  // namespace minifloat::torch_ops
