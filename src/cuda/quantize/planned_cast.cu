// Plans of casts: the arguments of their kernels, and their amaxes.
#include "cuda/quantize/planned_cast.cuh"

#include "cuda/backend.h"
#include "cuda/quantize/scales_and_amaxes.cuh"

namespace minifloat::cuda {
namespace {

constexpr std::int64_t kMostRows = std::int64_t{1} << 31;
constexpr std::int64_t kBlock = 128;  // threads, each of one scale or amax

std::uint32_t size(std::int64_t n) { return static_cast<std::uint32_t>(n); }
int log2_of(int power) { return __builtin_ctz(static_cast<unsigned>(power)); }

std::int64_t amax_count(const TensorRef& x, const Spec& spec, bool columnwise) {
  const std::int64_t parts = x.groups ? x.groups.count : x.batch;
  if (spec.has_tensor_amax()) return parts;
  if (!spec.has_row_amax()) return 0;
  return columnwise ? parts * x.cols : x.batch * x.rows;
}

// Returns the columns of the columnwise operand.
std::int64_t length_of_columns(const TensorRef& x) {
  return x.groups ? grouped_cols<std::int64_t>(x.rows, x.groups.unit, x.groups.count) : x.rows;
}

bool preset_writes(const Spec& spec, const KernelOperand& plan) {
  return plan.aligned &&
         (spec.transform == 0 || spec.is_eden() ||
          (spec.transform == kVec && plan.height_log2 == 0)) &&
         reinterpret_cast<std::uintptr_t>(plan.decoded) % 16 == 0;
}

// Clears swizzled scales where the layout has room for more than there are.
void clear_padding(const KernelOperand& plan, std::int64_t batch, const Execution& execution) {
  if (!plan.swizzled) return;
  const std::int64_t bytes = swizzled_size(plan.rows, plan.scale_cols);
  if (bytes == std::int64_t{plan.rows} * plan.scale_cols) return;
  check(cudaMemsetAsync(plan.scale, 0, static_cast<std::size_t>(batch * bytes),
                        cuda_stream(execution)),
        "quantize");
}

// Leaves the amax of a direction to the cast. Returns false where the cast cannot find it.
bool leave_amax_to_cast(PlannedOperand& d, bool is_alone) {
  if (!d.needs_amax()) return true;
  if (d.only_reports())
    d.amax_from = AmaxFrom::kCast;
  else if (is_alone && d.needs_untransformed_amax(true))
    d.amax_from = AmaxFrom::kRow;
  else
    return false;
  return true;
}

}  // namespace

// ---- A direction --------------------------------------------------------------------------------
PlannedOperand::PlannedOperand(const TensorRef& x, const Operand* operand, bool columnwise)
    : operand_(operand),
      columnwise_(columnwise),
      last_end_(last_end_of(x.groups)),
      count_(operand ? amax_count(x, operand->spec, columnwise) : 0),
      current_(operand ? operand->amax : nullptr) {}

KernelOperand PlannedOperand::kernel_operand(const TensorRef& x) const {
  KernelOperand plan = {};
  if (!operand_) return plan;
  const Operand& operand = *operand_;
  const Spec& spec = operand.spec;
  const std::int64_t rows = columnwise_ ? x.cols : x.rows;
  const std::int64_t cols = columnwise_ ? length_of_columns(x) : x.cols;
  const std::int64_t all_rows = (last_end_ && columnwise_ ? x.groups.count : x.batch) * rows;
  MINIFLOAT_CHECK(all_rows < kMostRows && cols < kMostRows,
                  "quantize: expected less than 2^31 rows in all and 2^31 columns, got ", all_rows,
                  " and ", cols);
  MINIFLOAT_CHECK(operand.row_bytes < 2 * kMostRows,
                  "quantize: expected row_bytes below 2^32, got ", operand.row_bytes);
  plan.rule = spec.rule;
  plan.rounding = spec.scale_rounding;
  plan.delayed = spec.delayed;
  plan.stochastic = spec.rounds_codes_stochastically();
  plan.points = spec.transform;
  plan.height_log2 = spec.has_blocks() ? log2_of(spec.block_rows) : 0;
  plan.vecs_log2 = spec.has_blocks() ? log2_of(spec.block_cols / kVec) : 0;
  plan.rows = size(rows);
  plan.padded = size(spec.padded_cols(cols));
  plan.has_gaps = operand.row_bytes > 0;
  plan.swizzled = operand.swizzled;
  plan.code_pitch = size(plan.has_gaps ? operand.row_bytes : spec.code_cols(cols));
  plan.scale_rows = spec.has_blocks() ? size(spec.scale_rows(rows)) : 0;
  plan.scale_cols = spec.has_blocks() ? size(spec.scale_cols(cols)) : 0;
  if (plan.has_gaps) plan.scale_cols = size(operand.row_bytes / spec.scale_bytes());
  const auto vec_bytes = static_cast<std::uint32_t>(kVec * spec.code_bits() / 8);
  plan.aligned = plan.code_pitch % vec_bytes == 0 &&
                 reinterpret_cast<std::uintptr_t>(operand.codes) % vec_bytes == 0;
  plan.random = operand.random.state;
  plan.random_size = operand.random.state_size;
  plan.stream = operand.random.stream;
  plan.row_ids = columnwise_ ? nullptr : operand.random.row_ids;
  plan.origin_row = operand.origin.row;
  plan.origin_col = operand.origin.col;
  plan.codes = operand.codes;
  plan.scale = operand.scale;
  plan.decoded = operand.decoded;
  plan.amax_out = operand.amax;
  plan.has_history = has_history();
  plan.amax_stride = has_history() ? size(operand.history.stride) : 1;
  if (count_ > 0) plan.amax = plan.reported = operand.given_amax;
  return plan;
}

std::size_t PlannedOperand::scratch_bytes() const {
  const bool is_kept_elsewhere = (has_history() && amax_from != AmaxFrom::kRead) ||
                                 amax_from == AmaxFrom::kRow || amax_from == AmaxFrom::kOther;
  return needs_amax() && !operand_->amax && !is_kept_elsewhere ? bytes_of_amaxes() : 0;
}

void PlannedOperand::set_amaxes(KernelOperand& to, const float* current) const {
  if (count_ == 0 || amax_from == AmaxFrom::kRow) return;
  to.amax = operand_->given_amax ? operand_->given_amax : current;
  to.reported = operand_->spec.delayed && operand_->amax ? current : to.amax;
  if (amax_from == AmaxFrom::kCast || amax_from == AmaxFrom::kCluster) to.current_amax = entries();
}

void PlannedOperand::clear(const Execution& execution) const {
  if (amax_from != AmaxFrom::kCast || has_history()) return;
  check(cudaMemsetAsync(current_, 0, bytes_of_amaxes(), cuda_stream(execution)), "quantize");
}

void PlannedOperand::raise_history(const float* amaxes, const Execution& execution) const {
  if (!has_history()) return;
  raise_entries<<<grid_of(ceil_div(count_, kBlock), "quantize"), kBlock, 0,
                  cuda_stream(execution)>>>(operand_->history, amaxes, count_);
  check_launch("quantize");
}

void PlannedOperand::write_empty(const Execution& execution) const {
  if (!operand_) return;
  const float* reported = operand_->spec.delayed ? nullptr : operand_->given_amax;
  write_scales_and_amaxes(operand_->given_amax, reported, operand_->amax, execution);
}

void PlannedOperand::write_groups(const KernelOperand& plan, const Execution& execution) const {
  if (!operand_ || !last_end_ || is_of_rows()) return;
  const bool is_written = !operand_->amax || operand_->amax == plan.reported;
  write_scales_and_amaxes(plan.amax, plan.reported, is_written ? nullptr : operand_->amax,
                          execution);
}

void PlannedOperand::write_scales_and_amaxes(const float* active_amax, const float* reported,
                                             float* amax, const Execution& execution) const {
  const Spec& spec = operand_->spec;
  if (count_ == 0 || (spec.has_blocks() && !amax)) return;
  const WholeArgs args = {count_,
                          active_amax,
                          reported,
                          amax,
                          spec.has_blocks() ? nullptr : static_cast<float*>(operand_->scale),
                          spec.elements,
                          spec.rule,
                          spec.scale_rounding,
                          is_of_rows() && !columnwise_ ? last_end_ : nullptr};
  write_whole<<<grid_of(ceil_div(count_, kBlock), "quantize"), kBlock, 0, cuda_stream(execution)>>>(
      args);
  check_launch("quantize");
}

// ---- A cast -------------------------------------------------------------------------------------
QuantizeArgs args_of(const TensorRef& x) {
  QuantizeArgs args = {};
  args.x = kernel_input(x);
  args.groups = device_groups(x.groups);
  args.is_bf16 = x.dtype == DType::kBFloat16;
  args.batch = x.batch;
  return args;
}

bool fits_preset(const QuantizeArgs& args) {
  return (!args.rowwise || preset_writes(args.row_spec, args.row)) &&
         (!args.columnwise || preset_writes(args.col_spec, args.col));
}

PlannedCast::PlannedCast(const TensorRef& of, const Operand* rowwise, const Operand* columnwise)
    : x(of), row(x, rowwise, false), col(x, columnwise, true), args(args_of(x)) {
  args.rowwise = rowwise, args.columnwise = columnwise;
  if (rowwise) args.row_spec = rowwise->spec;
  if (rowwise) args.amaxes_of_columns = rowwise->amaxes_of_columns;
  if (columnwise) args.col_spec = columnwise->spec;
  args.row = row.kernel_operand(x);
  args.col = col.kernel_operand(x);
  reads_columns = args.amaxes_of_columns;
}

bool PlannedCast::is_empty() const {
  const bool has_columns_of_groups = args.columnwise && x.groups.count > 0 && x.cols > 0;
  return x.batch * x.rows * x.cols == 0 && !has_columns_of_groups;
}

bool PlannedCast::leave_amaxes_to_cast() {
  reads_columns = false;
  return leave_amax_to_cast(row, !args.columnwise) && leave_amax_to_cast(col, false) &&
         fits_preset(args);
}

std::size_t PlannedCast::scratch_bytes() const {
  return round_up<std::size_t>(row.scratch_bytes(), 256) + col.scratch_bytes();
}

void PlannedCast::find_amaxes(std::byte* scratch, const Execution& execution) {
  row.use_scratch(scratch);
  col.use_scratch(scratch + round_up<std::size_t>(row.scratch_bytes(), 256));
  const bool is_shared = col.amax_from == AmaxFrom::kOther;
  row.set_amaxes(args.row, row.current());
  col.set_amaxes(args.col, is_shared ? row.current() : col.current());
  if (is_shared && args.row.current_amax && row.has_history()) args.row.same_amax = col.entries();
  if (reads_columns) cuda::amax(x, {args.row_spec, true}, args.amaxes_of_columns, execution);
  row.clear(execution);
  col.clear(execution);
  clear_padding(args.row, x.batch, execution);
  clear_padding(args.col, x.batch, execution);
  if (row.amax_from == AmaxFrom::kRead || col.amax_from == AmaxFrom::kRead) read_amaxes(execution);
}

// Reads x as few times as there are amaxes that no other read finds.
void PlannedCast::read_amaxes(const Execution& execution) const {
  const bool of_row = row.amax_from == AmaxFrom::kRead, of_col = col.amax_from == AmaxFrom::kRead;
  if (row.needs_untransformed_amax(true) && col.needs_untransformed_amax(true))
    return amax_of_rows_and_columns(x, row.current(), col.current(), execution);
  const bool is_one_matrix = x.dtype == DType::kBFloat16 && x.batch == 1 && !x.groups;
  if (is_one_matrix && row.needs_untransformed_amax(false) && !row.has_history() && of_col &&
      !col.is_of_rows() && !col.has_history())
    return amax_of_values_and_columns(x, col.amax_of(), row.current(), col.current(), execution);
  if (of_row) cuda::amax(x, row.amax_of(), row.current(), execution);
  if (of_col) cuda::amax(x, col.amax_of(), col.current(), execution);
  row.raise_history(row.current(), execution);
  col.raise_history(of_col ? col.current() : row.current(), execution);
}

void PlannedCast::run(const Execution& execution) {
  if (is_empty()) {
    row.write_empty(execution);
    col.write_empty(execution);
    if (reads_columns) cuda::amax(x, {args.row_spec, true}, args.amaxes_of_columns, execution);
    return;
  }
  const Scratch scratch(scratch_bytes(), execution);
  find_amaxes(scratch.as<std::byte>(), execution);
  if (writes_groups) row.write_groups(args.row, execution);
  if (writes_groups) col.write_groups(args.col, execution);
  if (launch) return launch(args, execution);
  if (launch_row) launch_row(args.of_direction(false), execution);
  if (launch_col) launch_col(args.of_direction(true), execution);
}

}  // namespace minifloat::cuda
