// Casts of FP4 operands that are written as FP8 (Operand::as_fp8): by one kernel where the rows'
// amaxes are found before it, else in two steps.
//
//     nvfp4+pow2    one read of x finds the amaxes of the tensor and of its rows. They give the
//                   largest block scale of each row, so the cast writes E4M3 codes at once
//     mxfp4         needs no amax before the cast, so no pass finds the rows': two steps
#include <optional>

#include "cuda/amax/amax.h"
#include "cuda/backend.h"
#include "cuda/quantize/planned_cast.cuh"
#include "fp4_cast.h"

namespace minifloat::cuda {
namespace {

struct Backend {
  static constexpr auto quantize = cuda::quantize;
  static constexpr auto fp4_as_fp8 = cuda::fp4_as_fp8;
};

void cast_in_two_steps(const TensorRef& x, const Operand* rowwise, const Operand* columnwise,
                       const Execution& execution) {
  std::optional<Scratch> memory;
  quantize_in_two_steps<Backend>(x, rowwise, columnwise, execution, [&](std::size_t bytes) {
    memory.emplace(bytes, execution);
    return memory->as<std::byte>();
  });
}

// ---- In one kernel ------------------------------------------------------------------------------
// Returns whether the operand is absent, or is an nvfp4+pow2 one that the kernels cast.
bool is_nvfp4_pow2(const Operand* o) {
  if (!o) return true;
  const Spec& spec = o->spec;
  return spec.rule == ScaleRule::kNvfp4 && spec.scale_rounding == ScaleRounding::kPowerOfTwo &&
         !o->given_amax && !o->decoded && !spec.has_blocks_2d() &&
         (spec.transform == 0 || spec.transform == kVec);
}

// Returns whether the specs and sizes allow one kernel. Two steps are faster for small matrices,
// which then take fewer launches, and for blocks of 16x16, whose scales both directions share.
bool fits(const TensorRef& x, const Operand* rowwise, const Operand* columnwise) {
  const std::int64_t unit = columnwise ? kTile : kVec;
  const QuantizeArgs args = args_of(x);
  return args.is_bf16 && x.batch == 1 && !x.groups && args.x.aligned && x.rows * x.cols > 0 &&
         x.cols % unit == 0 && (unit == kVec || x.rows % unit == 0) && is_nvfp4_pow2(rowwise) &&
         is_nvfp4_pow2(columnwise) && !(rowwise && rowwise->spec.transform > 0) &&
         !fits_one_cluster(args);
}

// The amaxes of the tensor, and of the rows of each operand that is written as FP8, from one read
// of x. Rows of the columnwise operand are columns of x.
class RowAmaxes {
 public:
  RowAmaxes(const TensorRef& x, const Operand* rowwise, const Operand* columnwise,
            const Execution& execution)
      : of_rows_(is_as_fp8(rowwise) ? rowwise->spec.scale_rows(x.rows) : 0),
        of_columns_(is_as_fp8(columnwise) ? columnwise->spec.scale_rows(x.cols) : 0),
        is_transformed_(columnwise && columnwise->spec.transform > 0),
        memory_(bytes(), execution) {}

  // Finds them.   rowwise, columnwise: as above
  void find(const TensorRef& x, bool rowwise, const Operand* columnwise,
            const Execution& execution) const {
    check(cudaMemsetAsync(memory_.as<void>(), 0, bytes(), cuda_stream(execution)), "quantize");
    AmaxesOfRows to = {};
    if (rowwise || !is_transformed_) to.untransformed.tensor = bits();
    if (of_rows_ > 0) to.untransformed.rows = bits() + kTensors;
    if (of_columns_ > 0) to.columns = bits() + kTensors + of_rows_;
    AmaxOf of_columns;
    if (is_transformed_) {
      of_columns = {columnwise->spec, true, columnwise->random};
      to.transformed = &of_columns, to.of_transformed = bits() + 1;
    }
    amaxes_of_rows(x, to, execution);
  }

  const float* of_tensor(bool columnwise) const {
    return memory_.as<float>() + (columnwise && is_transformed_ ? 1 : 0);
  }
  const std::uint32_t* rows() const { return bits() + kTensors; }
  const std::uint32_t* columns() const { return bits() + kTensors + of_rows_; }

 private:
  static constexpr std::int64_t kTensors = 2;  // of values, and of transformed columns
  std::uint32_t* bits() const { return memory_.as<std::uint32_t>(); }
  std::size_t bytes() const {
    return static_cast<std::size_t>(kTensors + of_rows_ + of_columns_) * sizeof(float);
  }

  std::int64_t of_rows_, of_columns_;
  bool is_transformed_;
  Scratch memory_;
};

// Plans the casts by amaxes that are found before: those of tensors, which the operands have as
// given, and those of their rows. Returns false where no kernel fits.
bool choose_as_fp8(PlannedCast& plan, const Operand* rowwise, const Operand* columnwise,
                   const std::uint32_t* rows, const std::uint32_t* columns) {
  if (!plan.leave_amaxes_to_cast()) return false;
  if (is_as_fp8(rowwise) && !write_as_fp8(plan.args.row, rows)) return false;
  if (is_as_fp8(columnwise) && !write_as_fp8(plan.args.col, columns)) return false;
  plan.launch = columnwise ? find_preset_tiles(plan.args) : find_preset_rows(plan.args);
  return plan.launch;
}

}  // namespace

bool quantize_rows_as_fp8(const TensorRef& x, const Operand& rowwise, const float* amax,
                          const std::uint32_t* amaxes_of_rows, const Execution& execution) {
  if (!fits(x, &rowwise, nullptr)) return false;
  Operand row = rowwise;
  row.given_amax = amax;
  PlannedCast plan(x, &row, nullptr);
  if (choose_as_fp8(plan, &row, nullptr, amaxes_of_rows, nullptr))
    plan.run(execution);
  else
    cast_in_two_steps(x, &row, nullptr, execution);
  return true;
}

void quantize_as_fp8(const TensorRef& x, const Operand* rowwise, const Operand* columnwise,
                     const Execution& execution) {
  if (!fits(x, rowwise, columnwise)) return cast_in_two_steps(x, rowwise, columnwise, execution);
  const RowAmaxes amaxes(x, rowwise, columnwise, execution);
  Operand row, col;
  if (rowwise) row = *rowwise, row.given_amax = amaxes.of_tensor(false);
  if (columnwise) col = *columnwise, col.given_amax = amaxes.of_tensor(true);
  PlannedCast plan(x, rowwise ? &row : nullptr, columnwise ? &col : nullptr);
  if (!choose_as_fp8(plan, rowwise, columnwise, amaxes.rows(), amaxes.columns()))
    return cast_in_two_steps(x, rowwise, columnwise, execution);
  amaxes.find(x, rowwise, columnwise, execution);
  plan.run(execution);
}

}  // namespace minifloat::cuda
