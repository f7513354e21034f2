// Casts of normalised values without those in memory: the choice of the kernels.
//
//     rowwise            one read of x; two where the scale is by an amax of the matrix
//     by tiles           a read of x for the statistics of rows and the amaxes, and another for
//                        the cast; one in between for the amax of transformed columns
#include <optional>

#include "cuda/backend.h"
#include "cuda/common/launch.h"
#include "cuda/norm/norm.h"
#include "cuda/norm/quantize_norm.h"
#include "cuda/norm/row.cuh"
#include "cuda/quantize/general.cuh"

namespace minifloat::cuda {
namespace {

// What the cast's kernels read.
struct NormCast {
  NormArgs of;
  const RowStatistics* statistics;  // null: by rows
};

bool launch(const NormCast& cast, const QuantizeArgs& args, bool rowwise, bool columnwise,
            const Execution* execution) {
  if (!columnwise)
    return launch_norm_rows_fp8(cast.of, args, execution) ||
           launch_norm_rows_fp4(cast.of, args, execution);
  return launch_norm_tiles_fp8(cast.of, cast.statistics, args, rowwise, execution) ||
         launch_norm_tiles_fp4(cast.of, cast.statistics, args, rowwise, execution);
}
bool launch_cast(const QuantizeArgs& args, bool rowwise, bool columnwise, const void* context,
                 const Execution& execution) {
  return launch(*static_cast<const NormCast*>(context), args, rowwise, columnwise, &execution);
}

// Returns whether a kernel is compiled for the sizes and the specs.
bool has_kernel(const Norm& of, const NormArgs& args, const Operand* rowwise,
                const Operand* columnwise) {
  const bool is_aligned = args.x.aligned && args.stores_vecs && of.cols % kVec == 0;
  if (of.dtype != DType::kBFloat16 || !is_aligned || of.cols > kMostRegisterCols) return false;
  if (columnwise && (of.rows % kTile != 0 || of.cols % kTile != 0)) return false;
  const auto fits = [&](const Operand* o, bool may_transform) {
    if (!o) return true;
    const Spec& spec = o->spec;
    const bool has_whole_blocks =
        columnwise || !spec.has_blocks() || of.cols % spec.block_cols == 0;
    const bool is_known = spec.transform == 0 || (may_transform && spec.transform == kVec);
    return has_whole_blocks && is_known && reinterpret_cast<std::uintptr_t>(o->decoded) % 16 == 0;
  };
  if (!fits(rowwise, false) || !fits(columnwise, true)) return false;
  QuantizeArgs asked = {};
  if (rowwise) asked.row_spec = rowwise->spec;
  if (columnwise) asked.col_spec = columnwise->spec;
  return launch({args, nullptr}, asked, rowwise, columnwise, nullptr);
}

// The memory of what the passes before the cast find, and the operands with their amaxes.
class Found {
 public:
  Found(const Norm& of, const Operand* rowwise, const Operand* columnwise,
        const Execution& execution) {
    // The amax of a row is found by the cast that reads nothing else.
    const bool is_alone = rowwise && !columnwise && rowwise->spec.has_row_amax();
    if (columnwise) statistics_ = take(2 * of.rows);
    amaxes_ = count_;
    if (needs_amax(rowwise) && !is_alone) row_ = place(of, rowwise->spec, false);
    if (needs_amax(columnwise)) col_ = place(of, columnwise->spec, true);
    if (count_ == 0) return;
    memory_.emplace(static_cast<std::size_t>(count_) * sizeof(float), execution);
    if (count_ > amaxes_)
      check(cudaMemsetAsync(memory_->as<float>() + amaxes_, 0,
                            static_cast<std::size_t>(count_ - amaxes_) * sizeof(float),
                            cuda_stream(execution)),
            "quantize_norm");
  }

  bool is_empty() const { return count_ == 0; }
  FoundNorm pointers() const {
    return {reinterpret_cast<RowStatistics*>(at(statistics_)), at(whole_), at(transformed_),
            at(rows_), at(cols_)};
  }
  Operand row(const Operand& operand) const { return given(operand, row_); }
  Operand col(const Operand& operand) const { return given(operand, col_); }

 private:
  using Slot = std::optional<std::int64_t>;

  static bool needs_amax(const Operand* o) {
    return o && !o->given_amax && (o->spec.has_tensor_amax() || o->spec.has_row_amax());
  }
  std::int64_t take(std::int64_t floats) {
    const std::int64_t begin = count_;
    count_ += floats;
    return begin;
  }
  Slot place(const Norm& of, const Spec& spec, bool columnwise) {
    const bool is_of_rows = spec.has_row_amax();
    Slot& slot =
        is_of_rows ? (columnwise ? cols_ : rows_) : (spec.transform > 0 ? transformed_ : whole_);
    if (!slot) slot = take(!is_of_rows ? 1 : columnwise ? of.cols : of.rows);
    return slot;
  }
  std::uint32_t* at(const Slot& slot) const {
    return slot ? memory_->as<std::uint32_t>() + *slot : nullptr;
  }
  Operand given(const Operand& operand, const Slot& slot) const {
    Operand out = operand;
    if (slot) out.given_amax = reinterpret_cast<const float*>(at(slot));
    return out;
  }

  std::int64_t count_ = 0, amaxes_ = 0;
  Slot statistics_, whole_, transformed_, rows_, cols_, row_, col_;
  std::optional<Scratch> memory_;
};

// Returns false, and casts nothing, where no kernel fits.
bool quantize_in_one(const Norm& of, const Operand* rowwise, const Operand* columnwise,
                     const Execution& execution) {
  NormCast cast = {norm_args(of), nullptr};
  if (!has_kernel(of, cast.of, rowwise, columnwise)) return false;
  const Found found(of, rowwise, columnwise, execution);
  if (!found.is_empty()) {
    const FoundNorm pointers = found.pointers();
    find_norm(cast.of, pointers, execution);
    if (pointers.transformed) find_transformed_amax(cast.of, pointers, execution);
    cast.statistics = pointers.statistics;
  }
  Operand row, col;
  if (rowwise) row = found.row(*rowwise);
  if (columnwise) col = found.col(*columnwise);
  return quantize_by(of.y_at(of.x), rowwise ? &row : nullptr, columnwise ? &col : nullptr,
                     launch_cast, &cast, execution);
}

}  // namespace

void quantize_norm(const Norm& of, const Operand* rowwise, const Operand* columnwise,
                   const Execution& execution) {
  if (quantize_in_one(of, rowwise, columnwise, execution)) return;
  const std::int64_t size = of.dtype == DType::kFloat32 ? 4 : 2;
  const Scratch y(static_cast<std::size_t>(of.rows * of.cols * size), execution);
  cuda::norm(of, y.as<void>(), execution);
  cuda::quantize(of.y_at(y.as<void>()), rowwise, columnwise, execution);
}

}  // namespace minifloat::cuda
