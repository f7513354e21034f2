// Quantization on the device: the choice of the kernels, and of who finds the active amax, where a
// rule has one; then the launches.
#include "cuda/backend.h"
#include "cuda/quantize/planned_cast.cuh"
#include "fp4_cast.h"

namespace minifloat::cuda {
namespace {

// Returns the launch of a preset kernel; null where none fits.
LaunchCast find_preset(const QuantizeArgs& args) {
  if (!args.x.aligned || !fits_preset(args)) return nullptr;
  if (!args.columnwise)
    return first_of(args, find_preset_eden, find_preset_rows, find_preset_group_rows,
                    find_preset_strided_rows);
  if (args.x.cols % kTile != 0) return nullptr;
  if (args.groups) return find_preset_group_tiles(args);
  if (args.x.rows % kTile != 0) return nullptr;
  return first_of(args, find_preset_fp32_tiles, find_preset_eden, find_blocks_2d,
                  find_preset_tiles);
}

// Returns the launch of one direction alone, of two.
LaunchCast find_alone(const QuantizeArgs& both, bool columnwise) {
  const LaunchCast launch = find_preset(both.of_direction(columnwise));
  return launch ? launch : launch_general;
}

// Finds the kernel that scales each row by an amax of its own, and finds that as well. Returns
// false where there is none.
bool choose_whole_rows(PlannedCast& plan) {
  const QuantizeArgs& args = plan.args;
  if (args.columnwise || !args.row_spec.has_row_amax() || !plan.row.needs_amax()) return false;
  if (args.amaxes_of_columns) plan.launch = find_rows_and_amaxes_of_columns(args);
  if (plan.launch)
    plan.reads_columns = false;
  else
    plan.launch = find_whole_rows(args);
  if (plan.launch) plan.row.amax_from = AmaxFrom::kRow;
  return plan.launch;
}

// Finds the kernel of one cluster, which computes the amaxes too. Returns false where none fits, or
// no amax is needed.
bool choose_one_cluster(PlannedCast& plan) {
  const bool of_row = plan.row.needs_amax(), of_col = plan.col.needs_amax();
  if (!(of_row || of_col) || !fits_one_cluster(plan.args)) return false;
  plan.launch = find_one_cluster(plan.args);
  if (!plan.launch) return false;
  const bool is_once =
      plan.row.can_raise_with(plan.col) || (!plan.row.has_history() && !plan.col.has_history());
  if (of_row) plan.row.amax_from = AmaxFrom::kCluster;
  if (of_col)
    plan.col.amax_from = plan.shares_amax() && is_once ? AmaxFrom::kOther : AmaxFrom::kCluster;
  return true;
}

// Leaves current amaxes to the preset kernel, if all are only reported, or else to reads before it.
void choose_amaxes(PlannedCast& plan) {
  const QuantizeArgs& args = plan.args;
  const bool in_cast = plan.launch && (!args.rowwise || plan.row.only_reports()) &&
                       (!args.columnwise || plan.col.only_reports());
  const AmaxFrom from = in_cast ? AmaxFrom::kCast : AmaxFrom::kRead;
  const bool is_once = in_cast ? plan.row.can_raise_with(plan.col) : plan.shares_amax();
  if (plan.row.needs_amax()) plan.row.amax_from = from;
  if (plan.col.needs_amax()) plan.col.amax_from = is_once ? AmaxFrom::kOther : from;
}

// Plans a cast of elements in memory.
PlannedCast choose(const TensorRef& x, const Operand* rowwise, const Operand* columnwise) {
  PlannedCast plan(x, rowwise, columnwise);
  if (plan.is_empty() || choose_whole_rows(plan) || choose_one_cluster(plan)) return plan;
  plan.launch = find_preset(plan.args);
  choose_amaxes(plan);
  if (plan.launch) return plan;
  plan.writes_groups = true;
  if (!rowwise || !columnwise) {
    plan.launch = launch_general;
    return plan;
  }
  plan.launch = find_pair(plan.args);
  if (plan.launch) return plan;
  plan.launch_row = find_alone(plan.args, false);
  plan.launch_col = find_alone(plan.args, true);
  return plan;
}

}  // namespace

void quantize(const TensorRef& x, const Operand* rowwise, const Operand* columnwise,
              const Execution& execution) {
  if (is_as_fp8(rowwise) || is_as_fp8(columnwise))
    return quantize_as_fp8(x, rowwise, columnwise, execution);
  choose(x, rowwise, columnwise).run(execution);
}

}  // namespace minifloat::cuda
