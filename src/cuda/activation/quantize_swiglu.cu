// Casts of h from gate and up: the choice of the kernel, and the amaxes that it needs. A cast that
// scales by the amax of the whole h reads h, which is written with its amax; any other computes it.
//
//     bytes an element of FP4 that is written as FP8: 4 read, 2 written; 2 read, 1 written
#include "cuda/activation/quantize_swiglu.h"

#include "cuda/activation/activation.h"
#include "cuda/activation/required_amaxes.h"
#include "cuda/activation/swiglu.cuh"
#include "cuda/backend.h"
#include "cuda/quantize/planned_cast.cuh"

namespace minifloat::cuda {
namespace {

// Returns whether a cast scales by the amax of the whole h, untransformed; null: there is no cast.
bool scales_by_whole(const Operand* o) {
  return !o || (o->spec.has_tensor_amax() && o->spec.transform == 0);
}

LaunchSwiGluCast find_kernel(const QuantizeArgs& args) {
  if (args.amaxes_of_columns)
    return args.columnwise ? nullptr : find_swiglu_rows_and_amaxes_of_columns(args);
  if (args.columnwise) return find_swiglu_tiles(args);
  const LaunchSwiGluCast whole_rows = find_swiglu_whole_rows(args);
  return whole_rows ? whole_rows : find_swiglu_rows(args);
}

// The plan of casts of h by a kernel that computes it.
struct SwiGluCast {
  SwiGluCast(const TensorRef& h, const Operand* rowwise, const Operand* columnwise)
      : plan(h, rowwise, columnwise) {
    if (plan.leave_amaxes_to_cast()) launch = find_kernel(plan.args);
  }
  void run(const SwiGluArgs& of, const Execution& execution) {
    plan.find_amaxes(nullptr, execution);
    launch(of, plan.args, execution);
  }

  PlannedCast plan;
  LaunchSwiGluCast launch = nullptr;  // null: no kernel fits
};

// Returns whether the amaxes of the tiles of h can be found for the casts.
bool finds_amaxes_of(const Operand* rowwise, const Operand* columnwise) {
  if (!columnwise || (rowwise && rowwise->spec.transform > 0)) return false;
  const Spec& spec = columnwise->spec;
  return spec.transform == 0 || (spec.transform == kVec && spec.has_blocks());
}

// Returns memory for h.
Scratch scratch_of_h(const SwiGlu& of, const Execution& execution) {
  return Scratch(static_cast<std::size_t>(of.rows * of.width) * sizeof(Bf16), execution);
}

// Casts rowwise to FP4 that is written as FP8, which needs the amaxes of h's rows.
bool quantize_rows(const SwiGlu& of, const SwiGluArgs& args, const Operand& rowwise,
                   const Execution& execution) {
  if (rowwise.spec.transform > 0) return false;
  const RequiredAmaxes found(of.rows, of.width, {{nullptr, &rowwise, nullptr}, {}}, execution);
  const SwiGluAmaxes amaxes = found.amaxes();
  if (!amaxes.whole[1]) return false;
  const Scratch values = scratch_of_h(of, execution);
  found.clear(execution);
  write_swiglu_and_amax(args, values.as<Bf16>(), amaxes, execution);
  const TensorRef h = of.h_at(values.as<void>());
  if (!quantize_rows_as_fp8(h, rowwise, reinterpret_cast<const float*>(amaxes.whole[1]),
                            amaxes.rows[1], execution))
    cuda::quantize(h, &rowwise, nullptr, execution);
  return true;
}

}  // namespace

bool quantize_swiglu_in_one(const SwiGlu& of, const Operand* rowwise, const Operand* columnwise,
                            const Execution& execution) {
  const SwiGluArgs args = args_of(of);
  if (of.dtype != DType::kBFloat16 || of.width % kVec != 0 || !args.is_aligned) return false;
  const TensorRef h = of.h_at(of.gate);
  const bool as_fp8 = is_as_fp8(rowwise) || is_as_fp8(columnwise);
  if (!as_fp8)
    if (SwiGluCast cast(h, rowwise, columnwise); cast.launch) {
      cast.run(args, execution);
      return true;
    }
  if (rowwise && rowwise->amaxes_of_columns) return false;
  // Groups have amaxes of their own.
  constexpr std::int64_t kMostVecs = std::int64_t{1} << 30;
  if (of.groups || of.rows * of.width / kSwiGluVec > kMostVecs) return false;
  if (as_fp8) return !columnwise && quantize_rows(of, args, *rowwise, execution);
  const bool reads_h = scales_by_whole(rowwise) && scales_by_whole(columnwise);
  if (!reads_h && !finds_amaxes_of(rowwise, columnwise)) return false;
  const SwiGluOperands to = {{nullptr, rowwise, nullptr}, {nullptr, columnwise, nullptr}};
  const RequiredAmaxes amaxes(of.rows, of.width, to, execution);
  if (amaxes.is_empty()) return false;
  Operand row, col;
  if (rowwise) row = amaxes.given(*rowwise, 1, false);
  if (columnwise) col = amaxes.given(*columnwise, 1, true);
  const Operand *to_row = rowwise ? &row : nullptr, *to_col = columnwise ? &col : nullptr;
  if (reads_h) {
    const Scratch values = scratch_of_h(of, execution);
    amaxes.clear(execution);
    write_swiglu_and_amax(args, values.as<Bf16>(), amaxes.amaxes(), execution);
    cuda::quantize(of.h_at(values.as<void>()), to_row, to_col, execution);
    return true;
  }
  SwiGluCast cast(h, to_row, to_col);
  if (!cast.launch) return false;
  amaxes.clear(execution);
  find_swiglu_amaxes(args, h, amaxes.amaxes(), execution);
  cast.run(args, execution);
  return true;
}

}  // namespace minifloat::cuda
