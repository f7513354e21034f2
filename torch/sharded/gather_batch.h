// GatherBatch: the weights that one all-gather of FSDP2 brings. One call before the gather casts
// the shards of all weights; one call after it fills all whole weights.
//
//     AmaxExchange.measure     shards -> amaxes that ranks exchange; the caller reduces them by MAX
//     AmaxExchange.accept      reduced amaxes -> the batches
//     GatherBatch.cast         shards, amaxes -> codes and tables of scales, as one rank sends them
//     GatherBatch.fill         what all ranks sent -> codes, scales and amaxes of both directions
//
// A weight is gathered in one of three modes:
//     one      one 2D-block format: its rowwise codes; the columnwise ones are transposed from them
//     both     two formats, both directions in every gather
//     split    two formats: rowwise before forward, columnwise before backward
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <utility>
#include <vector>

#include "sharded/row_shard.h"

namespace minifloat::torch_ops {

using Tensors = std::vector<at::Tensor>;
using Numbers = std::vector<std::int64_t>;

// Which gather: before forward, before backward; kBothGathers selects the directions of either.
enum Selection : std::int64_t { kForward, kBackward, kBothGathers };

// The gather, and the weight of a call; kAllWeights: all of the batch.
struct Choice {
  std::int64_t selection;
  std::int64_t weight;
};
inline constexpr std::int64_t kAllWeights = -1;

enum class GatherMode { kOne, kBoth, kSplit };

// One direction of a weight that is gathered, with the amaxes of its current values.
struct GatheredDirection {
  RowShard shard;
  at::Tensor packed = {};  // of the window, from packed_at on; undefined under a transform
  std::int64_t packed_at = 0;
  bool has_chosen_scales = false;  // packed amaxes have been through choose_scales
  at::Tensor exchanged = {};       // common to all ranks, from exchanged_at on
  std::int64_t exchanged_at = 0;
  std::int64_t scale_at = 0,
               amax_at = 0;  // of the common scale and amax within GatherBatch's memory

  std::uint32_t* amaxes() const;
};

struct BatchedWeight {
  GatherMode mode;
  std::vector<GatheredDirection> directions;  // rowwise, and columnwise unless the mode is kOne
  std::int64_t table_bytes = 0;  // a rank sends before forward and before backward alike

  std::vector<GatheredDirection*> selected(std::int64_t selection);
};

// One direction in a call of GatherBatch::cast: the memory that it writes.
struct CastEntry {
  GatheredDirection* direction;
  std::size_t weight;
  std::uint8_t* codes;  // of the gather's input
  std::uint8_t* table;  // null: no scales are gathered
  float *scale, *amax;  // common to all ranks; null: it has none
};

// Where the scales of each direction begin in a rank's table; the last number is the end.
Numbers table_starts(const std::vector<GatheredDirection*>& directions);

class GatherBatch : public torch::CustomClassHolder {
 public:
  // rows, cols: the two directions of each weight; modes: "one", "both" or "split" of each
  GatherBatch(const ShardCasts& rows, const ShardCasts& cols, const Texts& modes,
              std::int64_t world, std::int64_t rank);

  // How many int32 amaxes the ranks exchange for a gather; 0: every rank casts alone.
  std::int64_t exchanged(std::int64_t selection);

  // shards: of each weight (rows, cols); histories: float32 amax history of each weight, or none
  // where nothing is delayed; weight: the one that is cast, -1: all; writes: a number that changes
  // where torch has not counted a write; is_measured: whether AmaxExchange has the amaxes of the
  // current step. Returns for each weight the codes of each direction, and its table where it has
  // one.
  Tensors cast(Tensors shards, const Tensors& histories, std::int64_t selection,
               std::int64_t weight, std::int64_t writes, bool is_measured);

  // outputs: what all ranks sent, in the order of `cast`; targets: codes, scale, amax of the
  // rowwise and the columnwise direction of each weight; weight: the one that is filled, -1: all;
  // forward_alone: backward has a gather of its own. Directions that are not brought lose their
  // memory, unless one weight alone is filled.
  void fill(const Tensors& outputs, const Tensors& targets, std::int64_t selection,
            std::int64_t weight, bool forward_alone);

 private:
  friend class AmaxExchange;

  void readable_shards(Tensors& shards) const;
  static std::vector<std::pair<const void*, std::int64_t>> values_of(const Tensors& shards);
  std::vector<GatheredDirection*> selected(std::size_t weight, const Choice& choice);
  std::vector<PartialCast> plain_casts(const Tensors& shards, const Choice& choice,
                                       std::vector<GatheredDirection*>& directions);
  at::Tensor values_as_computed(const at::Tensor& shard, std::size_t weight) const;
  Tensors new_inputs(const at::Tensor& like, const Choice& choice);
  std::vector<CastEntry> entries_of(const Tensors& inputs, const Choice& choice);
  void measure_alone(const Tensors& shards, const Choice& choice);
  bool needs_measure(const Tensors& shards, const Choice& choice, std::int64_t writes);

  std::vector<BatchedWeight> weights_;
  at::Tensor common_;         // float32: scales and amaxes that every rank computes
  std::int64_t commons_ = 0;  // how many
  std::vector<std::pair<const void*, std::int64_t>> measured_;  // memory and version of the shards
  std::int64_t measured_writes_ = 0;
};

// The amaxes of several batches, exchanged at once.
class AmaxExchange : public torch::CustomClassHolder {
 public:
  explicit AmaxExchange(std::vector<c10::intrusive_ptr<GatherBatch>> batches)
      : batches_(std::move(batches)) {}

  // shards: of all batches in their order; writes: of each batch. Returns int32, empty where
  // nothing is exchanged; zero where other ranks alone have an amax.
  at::Tensor measure(const Tensors& shards, std::int64_t selection, const Numbers& writes);
  // exchanged: what measure returned, the largest of all ranks
  void accept(const at::Tensor& exchanged);

 private:
  std::vector<Tensors> shards_of_batches(const Tensors& shards, const Numbers& writes);

  std::vector<c10::intrusive_ptr<GatherBatch>> batches_;
  std::vector<GatheredDirection*> pending_;  // measured, not accepted yet
  at::Tensor exchanged_;
};

}  // namespace minifloat::torch_ops
