// GatherBatch: the weights of one all-gather of FSDP2. One call before the gather casts the shards
// of all weights. One call after the gather fills all whole weights.
//
//     GatherBatch.hold_…       the tensors that later calls read and fill, until the next hold_…
//     AmaxExchange.measure     shards -> amaxes that ranks exchange; the caller reduces them by MAX
//     AmaxExchange.accept      reduced amaxes -> the batches
//     GatherBatch.cast         shards, amaxes -> codes and tables of scales, as one rank sends them
//     GatherBatch.fill         what all ranks sent -> codes, scales and amaxes of both directions
//
// The batch holds the tensors because each tensor of a list takes time to pass from Python. What
// every call does alike is planned once (CastPlan), and targets are checked when they are held.
//
// A weight is gathered in one of three modes:
//     one      one 2D-block format: rowwise codes; the columnwise codes are their transpose
//     both     two formats, both directions in every gather
//     split    two formats: rowwise before forward, columnwise before backward
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "sharded/row_shard.h"

namespace minifloat::torch_ops {

using Tensors = std::vector<at::Tensor>;
using Numbers = std::vector<std::int64_t>;

// The gather of a call: before forward or before backward; kBothGathers: the directions of both.
enum Selection : std::int64_t { kForward, kBackward, kBothGathers };
inline constexpr std::size_t kSelections = 3;

// The weight of a call; kAllWeights: all weights of the batch.
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

// The directions of a weight in a gather, and the offset of each one's scales in a rank's table.
struct Selected {
  std::vector<GatheredDirection*> directions;
  Numbers table_starts;
};

struct BatchedWeight {
  GatherMode mode;
  std::vector<GatheredDirection> directions;  // rowwise, and columnwise unless the mode is kOne
  std::array<Selected, kSelections> selections = {};
  std::int64_t table_bytes = 0;  // of a rank, the same before forward and before backward
};

// ---- What every call of a gather does alike -----------------------------------------------------

// The cast of one direction. The offsets are in the memory of the inputs.
struct PlannedCast {
  GatheredDirection* direction;
  std::size_t weight;
  PartialCast cast = {};  // without memory; of no use under a transform
  std::int64_t codes_at = 0;
  std::int64_t table_at = -1;          // -1: no scales are gathered
  std::int64_t scale_bytes = 0;        // of scratch, where the cast does not write the table itself
  std::int64_t window_table_rows = 0;  // of the scales that the cast writes
};

// An input of the gather in the memory of all.
struct PlannedInput {
  std::size_t weight;
  std::int64_t at, bytes;
};

// The casts before a gather: all codes in one tensor, then all tables.
struct CastPlan {
  std::vector<PlannedCast> casts;
  std::vector<PlannedInput> inputs;  // weight by weight: codes of its directions, then its table
  std::vector<Span> padding;         // bytes that no cast writes, or not all
  std::int64_t bytes = 0;            // of the inputs
  std::int64_t scratch_bytes = 0;
  std::int64_t exchanged = 0;  // amaxes
};

// Scratch memory of one call, which is allocated when its first part is taken.
class Scratch {
 public:
  Scratch(const at::Tensor& like, std::int64_t bytes) : like_(like), bytes_(bytes) {}
  static std::int64_t size_of(std::int64_t bytes) { return round_up(bytes, kAlignment); }
  std::uint8_t* take(std::int64_t bytes);

 private:
  static constexpr std::int64_t kAlignment = 16;
  at::Tensor like_, memory_;
  std::int64_t bytes_, used_ = 0;
};

// ---- The batch ----------------------------------------------------------------------------------

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
  // targets: codes, scale, amax of the rowwise and the columnwise direction of each weight. Their
  // memory may be freed, and allocated before they are filled
  void hold_targets(Tensors targets);

  // outputs: of each gathered input, in the order of `cast`
  void hold_outputs(Tensors outputs) { outputs_ = std::move(outputs); }

  // Counts writes to these tensors from now on, and keeps none of them alive.
  void count_writes(const Tensors& tensors);
  // Tells whether one of them was written to since AmaxExchange accepted amaxes of both gathers, or
  // it has accepted none since they are counted.
  bool is_written() const;

  // Casts the shards before one gather. Returns the inputs of each weight: the codes of its
  // directions, and its table where it has one. is_measured: whether AmaxExchange has the amaxes of
  // the shards' values
  std::vector<Tensors> cast(std::int64_t selection, bool is_measured);

  // Fills the whole weights from the gathered codes and tables. Frees the memory of directions
  // without gathered codes, and before backward the rowwise codes that the columnwise ones are
  // transposed from, unless the call is of one weight. outputs: as those of hold_outputs, or the
  // last of them where those are held; weight: the one that is filled, -1: all; forward_alone:
  // whether backward has a separate gather; keeps_row: whether backward reads weights of the mode
  // one rowwise
  void fill(const Tensors& outputs, std::int64_t selection, std::int64_t weight, bool forward_alone,
            bool keeps_row);

 private:
  friend class AmaxExchange;

  void plan_casts(std::int64_t selection);
  const CastPlan& plan(std::int64_t selection, std::int64_t last = kBothGathers) const;
  Tensors readable_shards() const;
  const Tensors& outputs_with(const Tensors& given) const;
  std::int64_t writes() const;
  std::vector<PartialCast> untransformed_casts(const Tensors& shards, const CastPlan& plan) const;
  at::Tensor values_as_computed(const at::Tensor& shard, std::size_t weight) const;
  void measure_alone(const Tensors& shards, const CastPlan& plan);

  std::vector<BatchedWeight> weights_;
  std::array<CastPlan, kSelections> plans_;
  Tensors shards_, histories_, targets_, outputs_;
  std::vector<c10::VariableVersion> counters_;  // of writes
  std::optional<std::int64_t> writes_before_;   // the last amaxes of both gathers
  at::Tensor common_;             // float32: scales and amaxes that every rank computes
  std::int64_t common_size_ = 0;  // elements of common_
  std::int64_t join_bytes_ = 0;   // of scratch: gathered tables that are to be transposed
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
