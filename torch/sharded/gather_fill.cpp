// The call after a gather: gathered codes and tables to both directions of all weights of a batch.
//
//     phase                                               launches
//     codes, scales and amaxes that are copied            one
//     transposes of codes, and of columnwise scales       one for each width of element
#include <ATen/ATen.h>

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

// The copies and transposes of a call, with its scratch memory.
struct FillWork {
  Tensor like;
  const float* common;
  std::vector<Copy> copies;
  std::vector<Transpose> transposes;
  std::vector<Tensor> scratch;
  Tensors freed;  // FSDP2's memory, once the transposes have read it

  void copy(const void* from, const void* to, std::int64_t bytes) {
    if (from == to || bytes == 0) return;
    copies.push_back({static_cast<const std::uint8_t*>(from),
                      static_cast<std::uint8_t*>(const_cast<void*>(to)), bytes, false});
  }
  std::uint8_t* new_scratch(std::int64_t bytes) {
    scratch.push_back(at::empty({bytes}, like.options().dtype(at::kByte)));
    return scratch.back().mutable_data_ptr<std::uint8_t>();
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

void* data_of(const Tensor& t, std::int64_t bytes, const char* name) {
  bridge::check_bytes(kGatherFill, name, t, bytes);
  return const_cast<void*>(t.const_data_ptr());
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

void fill_scales(FillWork& work, const Sent& sent, const Target& target, bool is_transposed) {
  const RowShard& shard = sent.direction.shard;
  const std::int64_t bytes = shard.whole_table_rows() * shard.table_row_bytes();
  if (shard.has_row_table()) {
    join_tables(work, sent, 0, static_cast<std::uint8_t*>(data_of(target.scale, bytes, "scale")));
    join_tables(work, sent, shard.table_rows() * shard.table_row_bytes(),
                static_cast<std::uint8_t*>(data_of(target.amax, bytes, "amax")));
    return;
  }
  if (shard.has_common_scale()) {
    const std::int64_t common = shard.common_scales() * std::int64_t{sizeof(float)};
    work.copy(work.common + sent.direction.scale_at, data_of(target.scale, common, "scale"),
              common);
  } else if (is_transposed) {
    std::uint8_t* by_row = work.new_scratch(bytes);
    join_tables(work, sent, 0, by_row);
    transpose_table(work, shard, by_row, data_of(target.scale, bytes, "scale"));
  } else {
    join_tables(work, sent, 0, static_cast<std::uint8_t*>(data_of(target.scale, bytes, "scale")));
  }
  const std::int64_t amaxes = shard.common_amaxes() * std::int64_t{sizeof(float)};
  if (amaxes > 0)
    work.copy(work.common + sent.direction.amax_at, data_of(target.amax, amaxes, "amax"), amaxes);
}

void fill_direction(FillWork& work, const Sent& sent, const Target& target, bool is_columnwise) {
  const RowShard& shard = sent.direction.shard;
  if (is_columnwise) {
    const std::int64_t rows = shard.grown(shard.rows()), bits = shard.spec().code_bits();
    const std::int64_t bytes = shard.cols() * ceil_div<std::int64_t>(rows * bits, 8);
    work.transposes.push_back({.from = sent.codes,
                               .to = data_of(target.codes, bytes, "codes"),
                               .rows = rows,
                               .cols = shard.cols(),
                               .bits = static_cast<int>(bits)});
  } else {
    const std::int64_t bytes = shard.whole_bytes();
    work.copy(sent.codes, data_of(target.codes, bytes, "codes"), bytes);
  }
  fill_scales(work, sent, target, is_columnwise);
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
void fill_weight(FillWork& work, const std::vector<Sent>& sent, const Tensor* targets,
                 const Filled& filled, bool is_fetch) {
  const Target row = {targets[0], targets[1], targets[2]};
  const Target col = {targets[3], targets[4], targets[5]};
  if (!filled.row && !is_fetch) free_memory(row.scale);
  if (!filled.keeps_row && !is_fetch) work.freed.push_back(row.codes);
  if (!filled.col && !is_fetch) free_memory(col.codes);
  if (filled.row) {
    const RowShard& shard = sent[0].direction.shard;
    allocate_memory(row.scale);
    if (is_fetch) allocate_memory(row.codes, shard.world() * shard.chunk_bytes());
    fill_direction(work, sent[0], row, false);
  }
  if (filled.col) {
    allocate_memory(col.scale);
    if (is_fetch) allocate_memory(col.codes);
    fill_direction(work, sent.back(), col, true);
  }
}

}  // namespace

void GatherBatch::fill(const Tensors& outputs, std::int64_t selection, std::int64_t weight,
                       bool forward_alone, bool keeps_row) {
  const bool is_fetch = weight != kAllWeights;
  const Tensors& targets = targets_;
  TORCH_CHECK_VALUE(targets.size() == kTargets * weights_.size() && !outputs.empty(), kGatherFill,
                    ": expected ", kTargets * weights_.size(), " targets, got ", targets.size());
  TORCH_CHECK_VALUE(common_.defined() || common_size_ == 0, kGatherFill,
                    ": expected shards that were cast");
  bridge::check_same_device(kGatherFill, "tensors", common_, outputs[0]);
  for (const Tensors* list : {&outputs, &targets})
    for (const Tensor& t : *list) {
      bridge::check_same_device(kGatherFill, "tensors", t, outputs[0]);
      TORCH_CHECK_VALUE(
          (t.is_cpu() || t.is_cuda()) && t.layout() == at::kStrided && t.has_storage(), kGatherFill,
          ": expected dense tensors on the CPU or CUDA, got ", t.layout(), " on ", t.device());
      if (t.storage().nbytes() > 0) bridge::check_memory(kGatherFill, "tensors", t);
    }
  FillWork work;
  work.like = outputs[0];
  work.common = common_size_ > 0 ? common_.const_data_ptr<float>() : nullptr;
  std::size_t output = 0;
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    const std::int64_t table_bytes = weights_[i].table_bytes;
    const std::vector<GatheredDirection*> directions = selected(i, {selection, weight});
    if (directions.empty()) continue;
    const std::size_t count = directions.size() + (table_bytes > 0 ? 1 : 0);
    TORCH_CHECK_VALUE(output + count <= outputs.size(), kGatherFill,
                      ": expected the codes and tables of ", weights_.size(), " weights, got ",
                      outputs.size(), " tensors");
    const Tensor* of_weight = outputs.data() + output;
    output += count;
    const std::uint8_t* tables = nullptr;
    if (table_bytes > 0)
      tables = static_cast<const std::uint8_t*>(data_of(
          of_weight[directions.size()], directions[0]->shard.world() * table_bytes, "tables"));
    const Numbers starts = table_starts(directions);
    std::vector<Sent> sent;
    for (std::size_t k = 0; k < directions.size(); ++k) {
      const RowShard& shard = directions[k]->shard;
      const void* codes = data_of(of_weight[k], shard.world() * shard.chunk_bytes(), "codes");
      sent.push_back({*directions[k], static_cast<const std::uint8_t*>(codes),
                      tables ? tables + starts[k] : nullptr, table_bytes});
    }
    fill_weight(work, sent, targets.data() + kTargets * i,
                filled_by(weights_[i], selection, forward_alone, keeps_row), is_fetch);
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
