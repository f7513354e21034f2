// The amaxes that casts of computed values scale by and the caller has not passed: which are
// needed, and their memory. The producer of the values finds them before its cast. FP4 that is
// written as FP8 needs the amaxes of its rows too.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "cuda/common/launch.h"
#include "fp4_cast.h"
#include "minifloat/quantize.h"

namespace minifloat::cuda {

// The operands of the casts of a SwiGLU; null: not cast. Of d_gate, h and d_up, in this order.
struct SwiGluOperands {
  std::array<const Operand*, 3> row, col;
};

// Amaxes on the device, zero before they are raised; null: not needed. Of d_gate, h and d_up.
struct SwiGluAmaxes {
  std::uint32_t* whole[3];        // of a matrix
  std::uint32_t* transformed[3];  // of a matrix, columns of 16 points transformed
  std::uint32_t *rows[3], *cols[3];
  std::uint32_t* transformed_cols[3];  // of each column, 16 points transformed

  // Returns whether rows or columns, or transformed columns, have amaxes.
  bool of_rows_or_columns() const { return has_any(rows) || has_any(cols); }
  bool of_transformed() const { return has_any(transformed); }
  bool of_each_transformed() const { return has_any(transformed_cols); }

 private:
  static bool has_any(std::uint32_t* const (&pointers)[3]) {
    return pointers[0] || pointers[1] || pointers[2];
  }
};

// The amaxes that the casts need and the caller has not passed, and their memory.
class RequiredAmaxes {
 public:
  // rows, cols: of each matrix
  RequiredAmaxes(std::int64_t rows, std::int64_t cols, const SwiGluOperands& to,
                 const Execution& execution)
      : rows_(rows), cols_(cols) {
    for (std::size_t i = 0; i < 3; ++i) {
      place(to.row[i], i, false);
      place(to.col[i], i, true);
    }
    scratch_.emplace(bytes(), execution);
  }

  bool is_empty() const { return count_ == 0; }
  // Clears the amaxes, which the producer of the values raises then.
  void clear(const Execution& execution) const {
    check(cudaMemsetAsync(scratch_->as<void>(), 0, bytes(), cuda_stream(execution)), "amax");
  }
  SwiGluAmaxes amaxes() const {
    SwiGluAmaxes out = {};
    for (std::size_t i = 0; i < 3; ++i) {
      out.whole[i] = at(slots_[kWhole][i]), out.transformed[i] = at(slots_[kTransformed][i]);
      out.rows[i] = at(slots_[kRows][i]), out.cols[i] = at(slots_[kCols][i]);
      out.transformed_cols[i] = at(slots_[kTransformedCols][i]);
    }
    return out;
  }
  // Returns the operand with its amax.   i: of its matrix
  Operand given(const Operand& operand, std::size_t i, bool columnwise) const {
    Operand out = operand;
    if (is_needed(operand))
      out.given_amax = reinterpret_cast<const float*>(at(slots_[kind_of(operand, columnwise)][i]));
    return out;
  }
  // Returns the amaxes of the rows of an operand that is written as FP8; null for another operand.
  const std::uint32_t* of_rows(const Operand* operand, std::size_t i, bool columnwise) const {
    return is_as_fp8(operand) ? at(slots_[kind_of_rows(*operand, columnwise)][i]) : nullptr;
  }

 private:
  enum Kind : std::size_t { kWhole, kTransformed, kRows, kCols, kTransformedCols, kKinds };
  using Slot = std::optional<std::int64_t>;

  std::size_t bytes() const { return static_cast<std::size_t>(count_) * sizeof(float); }
  static bool is_needed(const Operand& operand) {
    return !operand.given_amax && (operand.spec.has_tensor_amax() || operand.spec.has_row_amax());
  }
  static Kind kind_of(const Operand& operand, bool columnwise) {
    if (operand.spec.has_row_amax()) return columnwise ? kCols : kRows;
    return operand.spec.transform > 0 ? kTransformed : kWhole;
  }
  static Kind kind_of_rows(const Operand& operand, bool columnwise) {
    if (!columnwise) return kRows;
    return operand.spec.transform > 0 ? kTransformedCols : kCols;
  }
  void place(const Operand* operand, std::size_t i, bool columnwise) {
    if (!operand) return;
    if (is_needed(*operand)) place(kind_of(*operand, columnwise), i);
    if (is_as_fp8(operand)) place(kind_of_rows(*operand, columnwise), i);
  }
  void place(Kind kind, std::size_t i) {
    if (slots_[kind][i]) return;
    slots_[kind][i] = count_;
    count_ += kind == kRows ? rows_ : kind == kCols || kind == kTransformedCols ? cols_ : 1;
  }
  std::uint32_t* at(const Slot& slot) const {
    return slot ? scratch_->as<std::uint32_t>() + *slot : nullptr;
  }

  std::int64_t rows_, cols_, count_ = 0;
  std::array<std::array<Slot, 3>, kKinds> slots_ = {};
  std::optional<Scratch> scratch_;
};

}  // namespace minifloat::cuda
