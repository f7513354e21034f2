// Quantization on the device: first the active amax, where a rule has one, then every tile.
#include <optional>

#include "cuda/backend.h"
#include "cuda/common/kernel_input.h"
#include "cuda/quantize/general.cuh"
#include "cuda/quantize/scales_and_amaxes.cuh"
#include "fp4_cast.h"

namespace minifloat::cuda {
namespace {

int log2_of(int power) { return __builtin_ctz(static_cast<unsigned>(power)); }

// The plan of one direction, and the scratch behind the plan's pointers.
class PlannedOperand {
 public:
  PlannedOperand(const TensorRef& x, const Operand& operand, bool columnwise,
                 const Execution& execution)
      : operand_(operand),
        columnwise_(columnwise),
        last_end_(last_end_of(x.groups)),
        count_(amax_count(x, operand.spec, columnwise)) {
    if (needs_current_amax() && !operand.amax && !has_history())
      scratch_.emplace(bytes_of_amaxes(), execution);
    const Spec& spec = operand.spec;
    const std::int64_t rows = columnwise ? x.cols : x.rows;
    const std::int64_t cols = columnwise ? length_of_rows(x) : x.cols;
    const std::int64_t all_rows = (last_end_ && columnwise ? x.groups.count : x.batch) * rows;
    MINIFLOAT_CHECK(all_rows < kMostRows && cols < kMostRows,
                    "quantize: expected less than 2^31 rows in all and 2^31 columns, got ",
                    all_rows, " and ", cols);
    MINIFLOAT_CHECK(operand.row_bytes < 2 * kMostRows,
                    "quantize: expected row_bytes below 2^32, got ", operand.row_bytes);
    plan_.rule = spec.rule;
    plan_.rounding = spec.scale_rounding;
    plan_.delayed = spec.delayed;
    plan_.stochastic = spec.rounds_codes_stochastically();
    plan_.points = spec.transform;
    plan_.height_log2 = spec.has_blocks() ? log2_of(spec.block_rows) : 0;
    plan_.vecs_log2 = spec.has_blocks() ? log2_of(spec.block_cols / kVec) : 0;
    plan_.rows = size(rows);
    plan_.padded = size(spec.padded_cols(cols));
    plan_.has_gaps = operand.row_bytes > 0;
    plan_.code_pitch = size(plan_.has_gaps ? operand.row_bytes : spec.code_cols(cols));
    plan_.scale_rows = spec.has_blocks() ? size(spec.scale_rows(rows)) : 0;
    plan_.scale_cols = spec.has_blocks() ? size(spec.scale_cols(cols)) : 0;
    if (plan_.has_gaps) plan_.scale_cols = size(operand.row_bytes / spec.scale_bytes());
    const auto vec_bytes = static_cast<std::uint32_t>(kVec * spec.code_bits() / 8);
    plan_.aligned = plan_.code_pitch % vec_bytes == 0 &&
                    reinterpret_cast<std::uintptr_t>(operand.codes) % vec_bytes == 0;
    plan_.random = operand.random.state;
    plan_.random_size = operand.random.state_size;
    plan_.stream = operand.random.stream;
    plan_.row_ids = columnwise ? nullptr : operand.random.row_ids;
    plan_.origin_row = operand.origin.row;
    plan_.origin_col = operand.origin.col;
    plan_.codes = operand.codes;
    plan_.scale = operand.scale;
    plan_.decoded = operand.decoded;
    plan_.amax_out = operand.amax;
    plan_.has_history = has_history();
    plan_.amax_stride = has_history() ? size(operand.history.stride) : 1;
    if (count_ > 0) take_amax(current_amax());
  }

  const KernelOperand& plan() const { return plan_; }
  // Returns whether the current amax is needed: for the scale, or for a history.
  bool needs_current_amax() const {
    return count_ > 0 && (!operand_.given_amax ||
                          (operand_.spec.delayed && (operand_.amax || operand_.history.first)));
  }
  // Returns whether the current amaxes are raised in a history, and nowhere else.
  bool has_history() const { return count_ > 0 && operand_.history.first; }
  bool is_of_rows() const { return operand_.spec.has_row_amax(); }
  bool is_transformed() const { return operand_.spec.transform > 0; }
  // Returns the memory of the current amaxes; null while only the cast finds those of a history.
  float* current_amax() const {
    if (operand_.amax) return operand_.amax;
    return scratch_ ? scratch_->as<float>() : nullptr;
  }

  void compute_amax(const TensorRef& x, const Execution& execution) {
    if (!current_amax()) scratch_.emplace(bytes_of_amaxes(), execution);
    cuda::amax(x, amax_of(), current_amax(), execution);
  }
  AmaxOf amax_of() const { return {operand_.spec, columnwise_, operand_.random}; }
  // Takes the current amax, (amaxes), complete by the time that the cast runs.
  void take_amax(const float* current) {
    plan_.amax = operand_.given_amax ? operand_.given_amax : current;
    plan_.reported = operand_.spec.delayed && operand_.amax ? current : plan_.amax;
  }
  // Returns whether the caller passed the active amax, and the current one is only reported.
  bool only_reports() const {
    return operand_.given_amax && needs_current_amax() && !is_of_rows() && !is_transformed();
  }
  // Leaves the current amax to the cast, if that is a preset's: it is raised as the cast reads x.
  void find_amax_in_cast(const Execution& execution) {
    find_amax_in_cluster();
    if (has_history()) return;
    check(cudaMemsetAsync(current_amax(), 0, bytes_of_amaxes(), cuda_stream(execution)),
          "quantize");
  }
  // Leaves the current amax to the cast, which clears and raises it before it encodes.
  void find_amax_in_cluster() {
    take_amax(current_amax());
    plan_.current_amax = entries();
  }
  // Returns whether one direction can raise the histories of both: they have the same amaxes.
  bool can_raise_with(const PlannedOperand& other) const {
    return has_history() && other.has_history() && plan_.amax_stride == other.plan_.amax_stride;
  }
  // Leaves the history of the other direction to this one.
  void raise_both(const PlannedOperand& other) { plan_.same_amax = other.entries(); }
  void find_amax_before_cast() { plan_.current_amax = plan_.same_amax = nullptr; }
  // Raises the history to amaxes that are complete.
  void raise_history(const float* amaxes, const Execution& execution) const {
    if (!has_history()) return;
    constexpr std::int64_t kBlock = 128;
    raise_entries<<<grid_of(ceil_div(count_, kBlock), "quantize"), kBlock, 0,
                    cuda_stream(execution)>>>(operand_.history, amaxes, count_);
    check_launch("quantize");
  }
  // Leaves the amax of its rows to the cast.
  void leave_amax() { plan_.amax = plan_.reported = nullptr; }

  // Writes the outputs of matrices and rows without elements: by the amax that was passed, or 0.
  void write_empty(const Execution& execution) const {
    const float* reported = operand_.spec.delayed ? nullptr : operand_.given_amax;
    write_whole(operand_.given_amax, reported, operand_.amax, execution);
  }
  // Writes the outputs of all groups under a rule with a tensor amax, when the amaxes are complete.
  // A group without rows has an amax of 0, if none was passed.
  void write_groups(const Execution& execution) const {
    if (!last_end_ || is_of_rows()) return;
    const bool is_written = !operand_.amax || operand_.amax == plan_.reported;
    write_whole(plan_.amax, plan_.reported, is_written ? nullptr : operand_.amax, execution);
  }

 private:
  static constexpr std::int64_t kMostRows = std::int64_t{1} << 31;
  static std::uint32_t size(std::int64_t n) { return static_cast<std::uint32_t>(n); }
  std::size_t bytes_of_amaxes() const { return static_cast<std::size_t>(count_) * sizeof(float); }
  // Returns the entries that the cast raises.
  std::uint32_t* entries() const {
    return reinterpret_cast<std::uint32_t*>(has_history() ? operand_.history.first
                                                          : current_amax());
  }
  static std::int64_t amax_count(const TensorRef& x, const Spec& spec, bool columnwise) {
    if (spec.has_tensor_amax()) return x.groups ? x.groups.count : x.batch;
    if (!spec.has_row_amax()) return 0;
    return columnwise ? (x.groups ? x.groups.count : x.batch) * x.cols : x.batch * x.rows;
  }
  // Returns the columns of the columnwise operand.
  static std::int64_t length_of_rows(const TensorRef& x) {
    return x.groups ? grouped_cols<std::int64_t>(x.rows, x.groups.unit, x.groups.count) : x.rows;
  }
  void write_whole(const float* active_amax, const float* reported, float* amax,
                   const Execution& execution) const {
    const Spec& spec = operand_.spec;
    if (count_ == 0 || (spec.has_blocks() && !amax)) return;
    const WholeArgs args = {count_,
                            active_amax,
                            reported,
                            amax,
                            spec.has_blocks() ? nullptr : static_cast<float*>(operand_.scale),
                            spec.elements,
                            spec.rule,
                            spec.scale_rounding,
                            is_of_rows() && !columnwise_ ? last_end_ : nullptr};
    constexpr std::int64_t kBlock = 128;
    cuda::write_whole<<<grid_of(ceil_div(count_, kBlock), "quantize"), kBlock, 0,
                        cuda_stream(execution)>>>(args);
    check_launch("quantize");
  }

  const Operand& operand_;
  bool columnwise_;
  const std::int32_t* last_end_;  // of groups of rows; null: there are none
  std::int64_t count_;
  std::optional<Scratch> scratch_;  // current amaxes that no output has
  KernelOperand plan_ = {};
};

bool needs_amax(const PlannedOperand* operand) { return operand && operand->needs_current_amax(); }

// Returns whether both directions need the same amax: that of all values, untransformed.
bool share_amax(const PlannedOperand* row, const PlannedOperand* col) {
  const auto is_of_values = [](const PlannedOperand* d) {
    return needs_amax(d) && !d->is_transformed() && !d->is_of_rows();
  };
  return is_of_values(row) && is_of_values(col);
}

// Returns whether both directions need the amaxes of rows as read, untransformed.
bool need_row_amaxes(const PlannedOperand* row, const PlannedOperand* col) {
  const auto is_of_rows = [](const PlannedOperand* d) {
    return needs_amax(d) && !d->is_transformed() && d->is_of_rows();
  };
  return is_of_rows(row) && is_of_rows(col);
}

// Returns whether one read finds both directions' amaxes: of all values, and of the columns'
// transforms.
bool share_read(const TensorRef& x, const PlannedOperand* row, const PlannedOperand* col) {
  const auto is_of_tensor = [](const PlannedOperand* d) {
    return needs_amax(d) && !d->is_of_rows() && !d->has_history();
  };
  return x.dtype == DType::kBFloat16 && x.batch == 1 && !x.groups && is_of_tensor(row) &&
         !row->is_transformed() && is_of_tensor(col) && col->is_transformed();
}

// Leaves the current amaxes to one cluster's cast, which computes a shared amax once.
void find_amaxes_in_cluster(PlannedOperand* row, PlannedOperand* col) {
  if (needs_amax(row)) row->find_amax_in_cluster();
  const bool is_shared = share_amax(row, col);
  if (is_shared && row->can_raise_with(*col))
    row->raise_both(*col);
  else if (is_shared && !row->has_history() && !col->has_history())
    col->take_amax(row->current_amax());
  else if (needs_amax(col))
    col->find_amax_in_cluster();
}

// Leaves current amaxes that are only reported to a preset's cast.
void find_amaxes_in_cast(PlannedOperand* row, PlannedOperand* col, const Execution& execution) {
  if (row) row->find_amax_in_cast(execution);
  if (row && col && row->can_raise_with(*col))
    row->raise_both(*col);
  else if (col)
    col->find_amax_in_cast(execution);
}

// Computes the current amaxes that casts need, with the fewest reads of x.
void compute_amaxes(const TensorRef& x, PlannedOperand* row, PlannedOperand* col,
                    const Execution& execution) {
  if (need_row_amaxes(row, col))
    return amax_of_rows_and_columns(x, row->current_amax(), col->current_amax(), execution);
  if (share_read(x, row, col))
    return amax_of_values_and_columns(x, col->amax_of(), row->current_amax(), col->current_amax(),
                                      execution);
  if (needs_amax(row)) row->compute_amax(x, execution);
  const bool is_shared = share_amax(row, col);
  if (is_shared)
    col->take_amax(row->current_amax());
  else if (needs_amax(col))
    col->compute_amax(x, execution);
  if (row) row->raise_history(row->current_amax(), execution);
  if (col) col->raise_history((is_shared ? row : col)->current_amax(), execution);
}

bool fits_preset(const Spec& spec, const KernelOperand& plan) {
  return plan.aligned &&
         (spec.transform == 0 || spec.is_eden() ||
          (spec.transform == kVec && plan.height_log2 == 0)) &&
         reinterpret_cast<std::uintptr_t>(plan.decoded) % 16 == 0;
}

// Casts by a preset kernel. Returns false, and launches nothing, where none fits.
bool launch_preset(const QuantizeArgs& args, bool rowwise, bool columnwise,
                   const Execution& execution) {
  if (!args.x.aligned) return false;
  if (rowwise && !fits_preset(args.row_spec, args.row)) return false;
  if (columnwise && !fits_preset(args.col_spec, args.col)) return false;
  if (rowwise && !columnwise)
    return (args.is_bf16 && !args.groups &&
            (launch_preset_eden(args, false, execution) || launch_preset_rows(args, execution))) ||
           (args.is_bf16 && launch_preset_group_rows(args, execution)) ||
           launch_preset_pitched_rows(args, execution);
  if (!args.is_bf16)
    return rowwise && !args.groups && args.x.cols % kTile == 0 && args.x.rows % kTile == 0 &&
           launch_preset_fp32_tiles(args, execution);
  if (args.x.cols % kTile != 0) return false;
  if (args.groups) return launch_preset_group_tiles(args, rowwise, execution);
  if (args.x.rows % kTile != 0) return false;
  if (!rowwise && launch_preset_eden(args, true, execution)) return true;
  return (rowwise && launch_blocks_2d(args, execution)) ||
         launch_preset_tiles(args, rowwise, execution);
}

// Returns the arguments of a launch, without a direction.
QuantizeArgs args_of(const TensorRef& x) {
  QuantizeArgs args = {};
  args.x = kernel_input(x);
  args.groups = device_groups(x.groups);
  args.is_bf16 = x.dtype == DType::kBFloat16;
  args.batch = x.batch;
  return args;
}

// Leaves the amax of a direction to the cast. Returns false where the cast cannot find it.
bool leave_amax_to_cast(PlannedOperand& d, bool is_alone, const Execution& execution) {
  if (!d.needs_current_amax()) return true;
  if (d.only_reports())
    d.find_amax_in_cast(execution);
  else if (is_alone && d.is_of_rows() && !d.is_transformed())
    d.leave_amax();
  else
    return false;
  return true;
}

void write_amaxes_of_columns(const TensorRef& x, const Operand* rowwise,
                             const Execution& execution) {
  if (rowwise && rowwise->amaxes_of_columns)
    cuda::amax(x, {rowwise->spec, true}, rowwise->amaxes_of_columns, execution);
}

}  // namespace

bool quantize_by(const TensorRef& x, const Operand* rowwise, const Operand* columnwise,
                 LaunchCast launch, const void* context, const Execution& execution) {
  if (is_as_fp8(rowwise) || is_as_fp8(columnwise)) return false;
  QuantizeArgs args = args_of(x);
  std::optional<PlannedOperand> row, col;
  if (rowwise) {
    args.row_spec = rowwise->spec;
    args.amaxes_of_columns = rowwise->amaxes_of_columns;
    row.emplace(x, *rowwise, false, execution);
    if (!leave_amax_to_cast(*row, !columnwise, execution)) return false;
    args.row = row->plan();
    if (!fits_preset(args.row_spec, args.row)) return false;
  }
  if (columnwise) {
    args.col_spec = columnwise->spec;
    col.emplace(x, *columnwise, true, execution);
    if (!leave_amax_to_cast(*col, false, execution)) return false;
    args.col = col->plan();
    if (!fits_preset(args.col_spec, args.col)) return false;
  }
  return launch(args, rowwise, columnwise, context, execution);
}

void quantize(const TensorRef& x, const Operand* rowwise, const Operand* columnwise,
              const Execution& execution) {
  if (is_as_fp8(rowwise) || is_as_fp8(columnwise))
    return quantize_as_fp8(x, rowwise, columnwise, execution);
  QuantizeArgs args = args_of(x);
  std::optional<PlannedOperand> row, col;
  if (rowwise) row.emplace(x, *rowwise, false, execution);
  if (columnwise) col.emplace(x, *columnwise, true, execution);
  const bool has_columns_of_groups = columnwise && x.groups.count > 0 && x.cols > 0;
  if (x.batch * x.rows * x.cols == 0 && !has_columns_of_groups) {
    if (row) row->write_empty(execution);
    if (col) col->write_empty(execution);
    write_amaxes_of_columns(x, rowwise, execution);
    return;
  }
  if (rowwise) args.row_spec = rowwise->spec;
  if (rowwise) args.amaxes_of_columns = rowwise->amaxes_of_columns;
  if (columnwise) args.col_spec = columnwise->spec;
  const bool finds_rows = row && !col && row->is_of_rows() && row->needs_current_amax();
  if (finds_rows) {
    row->leave_amax();
    args.row = row->plan();
    if (rowwise->amaxes_of_columns && launch_rows_and_amaxes_of_columns(args, execution)) return;
  }
  write_amaxes_of_columns(x, rowwise, execution);
  if (finds_rows) {
    if (launch_whole_rows(args, execution)) return;
    row->take_amax(row->current_amax());
  }
  const auto each = [&](auto f) {
    if (row) f(*row);
    if (col) f(*col);
  };
  if (fits_one_cluster(args)) {
    find_amaxes_in_cluster(row ? &*row : nullptr, col ? &*col : nullptr);
    if (row) args.row = row->plan();
    if (col) args.col = col->plan();
    if ((args.row.current_amax || args.col.current_amax) &&
        launch_one_cluster(args, row.has_value(), col.has_value(), execution))
      return;
    each([](PlannedOperand& d) { d.find_amax_before_cast(); });
  }
  bool only_report = true;
  each([&](const PlannedOperand& d) { only_report = only_report && d.only_reports(); });
  if (only_report) {
    find_amaxes_in_cast(row ? &*row : nullptr, col ? &*col : nullptr, execution);
    if (row) args.row = row->plan();
    if (col) args.col = col->plan();
    if (launch_preset(args, row.has_value(), col.has_value(), execution)) return;
    each([](PlannedOperand& d) { d.find_amax_before_cast(); });
  }
  compute_amaxes(x, row ? &*row : nullptr, col ? &*col : nullptr, execution);
  if (row) args.row = row->plan();
  if (col) args.col = col->plan();
  if (launch_preset(args, row.has_value(), col.has_value(), execution)) return;
  each([&](const PlannedOperand& d) { d.write_groups(execution); });
  if (row && col && launch_both(args, execution)) return;
  if (row && !(col && launch_preset(args, true, false, execution)))
    launch_general(args, false, execution);
  if (col && !(row && launch_preset(args, false, true, execution)))
    launch_general(args, true, execution);
}

}  // namespace minifloat::cuda
