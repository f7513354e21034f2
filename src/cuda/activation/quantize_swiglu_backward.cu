// The casts of a SwiGLU's gradients and of h: one kernel, after one that finds their amaxes where
// the scales need those; or the composition.
#include <array>
#include <optional>
#include <utility>

#include "cuda/activation/activation.h"
#include "cuda/activation/gradient_plans.cuh"
#include "cuda/activation/gradient_tile.cuh"
#include "cuda/activation/quantize_swiglu.h"
#include "cuda/activation/required_amaxes.h"
#include "cuda/backend.h"
#include "cuda/quantize/planned_cast.cuh"

namespace minifloat::cuda {
namespace {

// The plans of the casts of all matrices: d_gate, h and d_up.
class GradientCasts {
 public:
  // to: with their amaxes
  GradientCasts(const TensorRef& x, const SwiGluOperands& to) {
    for (std::size_t i = 0; i < 3; ++i)
      if (to.row[i] || to.col[i]) casts_[i].emplace(x, to.row[i], to.col[i]);
  }

  // Leaves the amaxes that are only reported to the kernel. Returns false where it cannot write an
  // operand.   amaxes: those of the rows of operands that are written as FP8
  bool fit(const SwiGluOperands& to, const RequiredAmaxes& amaxes) {
    for (std::size_t i = 0; i < 3; ++i) {
      if (!casts_[i]) continue;
      QuantizeArgs& args = casts_[i]->args;
      if (!casts_[i]->leave_amaxes_to_cast() || args.amaxes_of_columns) return false;
      if (is_as_fp8(to.row[i]) && !write_as_fp8(args.row, amaxes.of_rows(to.row[i], i, false)))
        return false;
      if (is_as_fp8(to.col[i]) && !write_as_fp8(args.col, amaxes.of_rows(to.col[i], i, true)))
        return false;
    }
    return true;
  }

  // Clears the amaxes that the kernel raises. Returns the plans.
  GradientPlans plans(const Execution& execution) {
    GradientPlans plans = {};
    for (std::size_t i = 0; i < 3; ++i) {
      if (!casts_[i]) continue;
      casts_[i]->find_amaxes(nullptr, execution);
      QuantizeArgs& args = casts_[i]->args;
      plans.current_amax[i] = std::exchange(args.row.current_amax, nullptr);
      plans.current_amax[3 + i] = std::exchange(args.col.current_amax, nullptr);
      (i == 1 ? plans.h : plans.col[i / 2]) = args.col;
      if (i != 1) plans.row[i / 2] = args.row;
    }
    for (const std::uint32_t* amax : plans.current_amax)
      plans.finds_amaxes = plans.finds_amaxes || amax;
    return plans;
  }

 private:
  std::array<std::optional<PlannedCast>, 3> casts_;
};

// Returns the launch of a kernel that casts matrices of these sizes under these specs; or null.
LaunchGradients find_kernel(const SwiGlu& of, const GradientSpecs& specs,
                            const GradientArgs& args) {
  const auto fits = [](const Spec& spec) { return spec.transform == 0 || spec.transform == kVec; };
  if (of.dtype != DType::kBFloat16 || !args.of.is_aligned || of.rows % kTile != 0 ||
      of.width % kTile != 0 || !fits(specs.row) || !fits(specs.col) || !fits(specs.h))
    return nullptr;
  const LaunchGradients found = find_gradients_fp8(specs);
  return found ? found : find_gradients_fp4(specs);
}

// Returns whether both gradients are cast in both directions alike, and all operands or none are
// written as FP8.
bool is_alike(const SwiGluCasts& casts) {
  if (!casts.gate_row || !casts.gate_col) return false;
  if (casts.up_row || casts.up_col)
    if (!casts.up_row || casts.up_row->spec != casts.gate_row->spec || !casts.up_col ||
        casts.up_col->spec != casts.gate_col->spec)
      return false;
  for (const Operand* o : {casts.gate_col, casts.up_row, casts.up_col, casts.h_col})
    if (o && o->as_fp8 != casts.gate_row->as_fp8) return false;
  return true;
}

bool quantize_in_one(const SwiGlu& of, const void* dh, std::int64_t dh_stride,
                     const SwiGluCasts& casts, const Execution& execution) {
  if (!is_alike(casts)) return false;
  GradientArgs args = {args_of(of), static_cast<const Bf16*>(dh), dh_stride, casts.h_col != nullptr,
                       Divisor(std::max<std::int64_t>(of.width / kTile, 1))};
  args.of.is_aligned = args.of.is_aligned && has_aligned_rows(dh, dh_stride * 2, of.rows);
  const GradientSpecs specs = {casts.gate_row->spec, casts.gate_col->spec,
                               casts.h_col ? casts.h_col->spec : Spec{}, args.has_h,
                               casts.gate_row->as_fp8};
  const LaunchGradients launch = find_kernel(of, specs, args);
  if (!launch) return false;
  const SwiGluOperands to = {{casts.gate_row, nullptr, casts.up_row},
                             {casts.gate_col, casts.h_col, casts.up_col}};
  const RequiredAmaxes amaxes(of.rows, of.width, to, execution);
  std::array<Operand, 6> given;
  SwiGluOperands complete = {};
  for (std::size_t i = 0; i < 3; ++i) {
    if (to.row[i]) complete.row[i] = &(given[i] = amaxes.given(*to.row[i], i, false));
    if (to.col[i]) complete.col[i] = &(given[3 + i] = amaxes.given(*to.col[i], i, true));
  }
  GradientCasts planned(of.h_at(of.gate), complete);
  if (!planned.fit(complete, amaxes)) return false;
  if (!amaxes.is_empty()) {
    amaxes.clear(execution);
    find_gradient_amaxes(args, amaxes.amaxes(), execution);
  }
  launch(args, planned.plans(execution), execution);
  return true;
}

}  // namespace

void quantize_swiglu_backward(const SwiGlu& of, const void* dh, std::int64_t dh_stride,
                              const SwiGluCasts& casts, const Execution& execution) {
  if (quantize_in_one(of, dh, dh_stride, casts, execution)) return;
  const auto bytes =
      static_cast<std::size_t>(of.rows * of.width) * (of.dtype == DType::kFloat32 ? 4 : 2);
  const Scratch d_gate(bytes, execution), d_up(of.up ? bytes : 0, execution);
  cuda::swiglu_backward(of,
                        {.dh = dh,
                         .dh_stride = dh_stride,
                         .gate = d_gate.as<void>(),
                         .up = of.up ? d_up.as<void>() : nullptr,
                         .stride = of.width,
                         .weights = nullptr},
                        execution);
  cuda::quantize(of.h_at(d_gate.as<void>()), casts.gate_row, casts.gate_col, execution);
  if (of.up) cuda::quantize(of.h_at(d_up.as<void>()), casts.up_row, casts.up_col, execution);
  if (casts.h_col) cuda::quantize_swiglu(of, nullptr, casts.h_col, execution);
}

}  // namespace minifloat::cuda
