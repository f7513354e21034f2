// The casts of a SwiGLU's gradients and of h: one kernel, after one that finds their amaxes where
// the scales need those; or the composition.
#include <array>

#include "cuda/activation/activation.h"
#include "cuda/activation/found_amaxes.h"
#include "cuda/activation/gradient_plans.cuh"
#include "cuda/activation/gradient_tile.cuh"
#include "cuda/activation/quantize_swiglu.h"
#include "cuda/backend.h"
#include "cuda/quantize/fp4_written_as_fp8.cuh"
#include "cuda/quantize/general.cuh"

namespace minifloat::cuda {
namespace {

// Plans the casts of all matrices. Each matrix's plans are made by a call of quantize_by, whose
// launch makes the next one's call; the last launches the kernel.
class Planner {
 public:
  // to: with their amaxes; amaxes: those of the rows of operands that are written as FP8
  Planner(const SwiGlu& of, const GradientSpecs& specs, const GradientArgs& args,
          const SwiGluOperands& to, const FoundAmaxes& amaxes)
      : x_(of.h_at(of.gate)), specs_(specs), args_(args), to_(to), amaxes_(amaxes) {}

  bool run(const Execution& execution) { return plan_from(0, execution); }

 private:
  // Plans the matrices from number i on.
  bool plan_from(int i, const Execution& execution) {
    while (i < 3 && !to_.row[i] && !to_.col[i]) ++i;
    if (i == 3) return launch(execution);
    matrix_ = i;
    const OperandInFp4 row(to_.row[i]), col(to_.col[i]);
    return quantize_by(x_, row.get(), col.get(), take, this, execution);
  }
  static bool take(const QuantizeArgs& args, bool rowwise, bool columnwise, const void* context,
                   const Execution& execution) {
    auto& self = *static_cast<Planner*>(const_cast<void*>(context));
    const int i = self.matrix_, of = i == 2;
    const bool fits =
        !args.amaxes_of_columns &&
        (!rowwise || self.keep(args.row, self.plans_.row[of], i, false)) &&
        (!columnwise || self.keep(args.col, i == 1 ? self.plans_.h : self.plans_.col[of], i, true));
    return fits && self.plan_from(i + 1, execution);
  }
  // Keeps the plan of a direction of matrix i. Returns whether the kernel can write the operand.
  bool keep(const KernelOperand& plan, KernelOperand& to, int i, bool columnwise) {
    const auto matrix = static_cast<std::size_t>(i);
    to = plan;
    plans_.current_amax[columnwise ? 3 + i : i] = plan.current_amax;
    plans_.finds_amaxes = plans_.finds_amaxes || plan.current_amax;
    to.current_amax = nullptr;
    const Operand* const operand = columnwise ? to_.col[matrix] : to_.row[matrix];
    return !is_as_fp8(operand) || write_as_fp8(to, amaxes_.of_rows(operand, matrix, columnwise));
  }
  bool launch(const Execution& execution) const {
    return launch_gradients_fp8(specs_, args_, &plans_, execution) ||
           launch_gradients_fp4(specs_, args_, &plans_, execution);
  }

  TensorRef x_;
  const GradientSpecs& specs_;
  const GradientArgs& args_;
  const SwiGluOperands& to_;
  const FoundAmaxes& amaxes_;
  int matrix_ = 0;
  GradientPlans plans_ = {};
};

// Returns whether a kernel casts matrices of these sizes under these specs.
bool has_kernel(const SwiGlu& of, const GradientSpecs& specs, const GradientArgs& args,
                const Execution& execution) {
  const auto fits = [](const Spec& spec) { return spec.transform == 0 || spec.transform == kVec; };
  return of.dtype == DType::kBFloat16 && args.of.is_aligned && of.rows % kTile == 0 &&
         of.width % kTile == 0 && fits(specs.row) && fits(specs.col) && fits(specs.h) &&
         (launch_gradients_fp8(specs, args, nullptr, execution) ||
          launch_gradients_fp4(specs, args, nullptr, execution));
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
                               casts.h_col ? casts.h_col->spec : Spec{}, casts.gate_row->as_fp8};
  if (!has_kernel(of, specs, args, execution)) return false;
  const SwiGluOperands to = {{casts.gate_row, nullptr, casts.up_row},
                             {casts.gate_col, casts.h_col, casts.up_col}};
  const FoundAmaxes amaxes(of.rows, of.width, to, execution);
  if (!amaxes.is_empty()) find_gradient_amaxes(args, amaxes.amaxes(), execution);
  std::array<Operand, 6> given;
  SwiGluOperands complete = {};
  for (std::size_t i = 0; i < 3; ++i) {
    if (to.row[i]) complete.row[i] = &(given[i] = amaxes.given(*to.row[i], i, false));
    if (to.col[i]) complete.col[i] = &(given[3 + i] = amaxes.given(*to.col[i], i, true));
  }
  return Planner(of, specs, args, complete, amaxes).run(execution);
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
