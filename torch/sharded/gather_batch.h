// GatherBatch: the weights of one all-gather of FSDP2. One call before the gather casts the shards
// of all weights. One call after the gather fills all whole weights.
//
//     GatherBatch.hold_…       the tensors that later calls read and fill, until the next hold_…
//     AmaxExchange.measure     shards -> amaxes that ranks exchange; the caller reduces them by MAX
//     AmaxExchange.accept      reduced amaxes -> the batches
//     GatherBatch.cast         shards, amaxes -> codes and tables of scales, as one rank sends them
//     GatherBatch.fill         what all ranks sent -> codes, scales and amaxes of both directions
//
// The batch holds the tensors because each tensor of a list takes time to pass from Python.
//
// A weight is gathered in one of three modes:
//     one      one 2D-block format: rowwise codes; the columnwise codes are their transpose
//     both     two formats, both directions in every gather
//     split    two formats: rowwise before forward, columnwise before backward
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <optional>
#include <utility>
#include <vector>

#include "sharded/row_shard.h"

namespace minifloat::torch_ops {

using Tensors = std::vector<at::Tensor>;
using Numbers = std::vector<std::int64_t>;

// The gather of a call: before forward or before backward; kBothGathers: the directions of both.
enum Selection : std::int64_t { kForward, kBackward, kBothGathers };

// The gather and the weight of a call; kAllWeights: all weights of the batch.
struct Choice {
  std::int64_t selection;
  std::int64_t weight;
};
inline constexpr std::int64_t kAllWeights = -1;

enum class GatherMode { kOne, kBoth, kSplit };

// One gathered direction of a weight, with the amaxes of the weight's current values.
struct GatheredDirection {
  RowShard shard;
  at::Tensor packed = {};  // the window's, from packed_at on; undefined under a transform
  std::int64_t packed_at = 0;
  bool has_chosen_scales = false;  // packed amaxes have been through choose_scales
  at::Tensor exchanged = {};       // common to all ranks, from exchanged_at on
  std::int64_t exchanged_at = 0;
  // The places of the common scale and amax in GatherBatch's memory.
  std::int64_t scale_at = 0, amax_at = 0;

  std::uint32_t* amaxes() const;
};

struct BatchedWeight {
  GatherMode mode;
  std::vector<GatheredDirection> directions;  // rowwise, and columnwise unless the mode is kOne
  std::int64_t table_bytes = 0;  // of a rank, the same before forward and before backward

  std::vector<GatheredDirection*> selected(std::int64_t selection);
};

// One direction in a call of GatherBatch::cast, with the memory that the cast writes.
struct CastEntry {
  GatheredDirection* direction;
  std::size_t weight;
  std::uint8_t* codes;  // of the gather's input
  std::uint8_t* table;  // null: no scales are gathered
  float *scale, *amax;  // common to all ranks; null: none
};

// Returns the offsets of each direction's scales in a rank's table; the last number is the end.
Numbers table_starts(const std::vector<GatheredDirection*>& directions);

class GatherBatch : public torch::CustomClassHolder {
 public:
  // rows, cols: the two directions of each weight; modes: "one", "both" or "split" of each
  GatherBatch(const ShardCasts& rows, const ShardCasts& cols, const Texts& modes,
              std::int64_t world, std::int64_t rank);

  // Returns the number of int32 amaxes that ranks exchange for a gather; 0: ranks exchange none.
  std::int64_t exchanged(std::int64_t selection);

  // shards: of each weight (rows, cols); histories: the float32 amax history of each weight, any
  // tensor where it has none; empty where nothing is delayed
  void hold_shards(Tensors shards, Tensors histories);
  // targets: codes, scale, amax of the rowwise and the columnwise direction of each weight
  void hold_targets(Tensors targets);

  // Counts writes to these tensors from now on, and keeps none of them alive.
  void count_writes(const Tensors& tensors);
  // Tells whether one of them was written to since AmaxExchange accepted amaxes of both gathers, or
  // it has accepted none since they are counted.
  bool is_written() const;

  // Casts the shards. Returns the inputs of the gather of each weight: the codes of its directions,
  // and its table where it has one; none of a weight that is not cast. weight: the one that is
  // cast, -1: all; is_measured: whether AmaxExchange has the amaxes of the shards' values
  std::vector<Tensors> cast(std::int64_t selection, std::int64_t weight, bool is_measured);

  // Fills the whole weights from the gathered codes and tables. Frees the memory of directions
  // without gathered codes, and before backward the rowwise codes that the columnwise ones are
  // transposed from, unless the call is of one weight. outputs: the output of each gathered input,
  // in the order of `cast`; weight: the one that is filled, -1: all; forward_alone: whether
  // backward has a separate gather; keeps_row: whether backward reads weights of the mode one
  // rowwise
  void fill(const Tensors& outputs, std::int64_t selection, std::int64_t weight, bool forward_alone,
            bool keeps_row);

 private:
  friend class AmaxExchange;

  Tensors readable_shards() const;
  std::int64_t writes() const;
  std::vector<GatheredDirection*> selected(std::size_t weight, const Choice& choice);
  std::vector<PartialCast> untransformed_casts(const Tensors& shards, const Choice& choice,
                                               std::vector<GatheredDirection*>& directions);
  at::Tensor values_as_computed(const at::Tensor& shard, std::size_t weight) const;
  std::vector<Tensors> new_inputs(const at::Tensor& like, const Choice& choice);
  std::vector<CastEntry> entries_of(const std::vector<Tensors>& inputs, const Choice& choice);
  void measure_alone(const Tensors& shards, const Choice& choice);
  bool needs_measure(const Choice& choice);

  std::vector<BatchedWeight> weights_;
  Tensors shards_, histories_, targets_;
  std::vector<c10::VariableVersion> counters_;  // of writes
  std::optional<std::int64_t> writes_before_;   // the last amaxes of both gathers
  at::Tensor common_;             // float32: scales and amaxes that every rank computes
  std::int64_t common_size_ = 0;  // elements of common_
};

// The amaxes of several batches, exchanged in one all-reduce.
class AmaxExchange : public torch::CustomClassHolder {
 public:
  explicit AmaxExchange(std::vector<c10::intrusive_ptr<GatherBatch>> batches)
      : batches_(std::move(batches)) {}

  // Measures the amaxes that ranks exchange. Returns int32, empty where nothing is exchanged; zero
  // where only other ranks have an amax.
  at::Tensor measure(std::int64_t selection);
  // Gives the batches the amaxes of all ranks. exchanged: the tensor of measure, reduced by MAX
  void accept(const at::Tensor& exchanged);

 private:
  std::vector<Tensors> shards_of_batches() const;

  std::vector<c10::intrusive_ptr<GatherBatch>> batches_;
  std::vector<GatheredDirection*> pending_;  // measured, not accepted yet
  bool is_of_both_ = false;                  // gathers
  at::Tensor exchanged_;
};

}  // namespace minifloat::torch_ops
