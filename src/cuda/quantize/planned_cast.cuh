// The plan of a cast: its kernel, the kernel's arguments, and the step that computes each amax.
// Planning allocates and launches nothing.
#pragma once

#include "cuda/quantize/general.cuh"

namespace minifloat::cuda {

// The step that computes the current amax of a direction.
enum class AmaxFrom : std::uint8_t {
  kCaller,   // the caller passed what is needed, or nothing is
  kRead,     // a read of x before the cast
  kCast,     // the cast, which raises it as it reads x; it is cleared before
  kCluster,  // a cast by one cluster, which clears and raises it before it encodes
  kRow,      // a cast of whole rows, in registers; no other kernel reads it
  kOther     // the step of the other direction, whose amax is the same
};

// One direction of a cast, and its amaxes: of matrices, groups or rows.
class PlannedOperand {
 public:
  // operand: null: the direction is not cast
  PlannedOperand(const TensorRef& x, const Operand* operand, bool columnwise);

  // Returns what the kernel is passed, with no amaxes but those that the caller passed.
  KernelOperand kernel_operand(const TensorRef& x) const;

  // Returns whether the current amax is needed: for the scale, or for a history.
  bool needs_amax() const {
    return count_ > 0 && (!operand_->given_amax ||
                          (operand_->spec.delayed && (operand_->amax || operand_->history.first)));
  }
  // Returns whether the current amaxes are raised in a history, and nowhere else.
  bool has_history() const { return count_ > 0 && operand_->history.first; }
  bool is_of_rows() const { return operand_->spec.has_row_amax(); }
  // Returns whether the amaxes are those of values as read, of each row or of all.
  bool needs_untransformed_amax(bool of_rows) const {
    return needs_amax() && operand_->spec.transform == 0 && is_of_rows() == of_rows;
  }
  // Returns whether the caller passed the active amax, and the current one is only reported.
  bool only_reports() const { return needs_untransformed_amax(false) && operand_->given_amax; }
  // Returns whether one direction can raise the histories of both: they have the same amaxes.
  bool can_raise_with(const PlannedOperand& other) const {
    return has_history() && other.has_history() &&
           operand_->history.stride == other.operand_->history.stride;
  }
  AmaxOf amax_of() const { return {operand_->spec, columnwise_, operand_->random}; }

  // Returns the bytes of current amaxes that no output has.
  std::size_t scratch_bytes() const;
  // Places those amaxes.
  void use_scratch(std::byte* scratch) {
    if (scratch_bytes() > 0) current_ = reinterpret_cast<float*>(scratch);
  }
  // Returns the memory of the current amaxes; null while only a history has them.
  float* current() const { return current_; }
  // Returns the entries that the cast raises.
  std::uint32_t* entries() const {
    return reinterpret_cast<std::uint32_t*>(has_history() ? operand_->history.first : current_);
  }
  // Passes the kernel its amaxes.   current: those of this call, complete before the kernel's casts
  void set_amaxes(KernelOperand& to, const float* current) const;

  // Clears the amaxes that the cast raises.
  void clear(const Execution& execution) const;
  // Raises the history to amaxes that are complete.
  void raise_history(const float* amaxes, const Execution& execution) const;
  // Writes the outputs of matrices and rows without elements: by the amax that was passed, or 0.
  void write_empty(const Execution& execution) const;
  // Writes the outputs of all groups under a rule with a tensor amax, when the amaxes are complete.
  // A group without rows has an amax of 0, if none was passed.
  void write_groups(const KernelOperand& plan, const Execution& execution) const;

  AmaxFrom amax_from = AmaxFrom::kCaller;

 private:
  std::size_t bytes_of_amaxes() const { return static_cast<std::size_t>(count_) * sizeof(float); }
  void write_scales_and_amaxes(const float* active_amax, const float* reported, float* amax,
                               const Execution& execution) const;

  const Operand* operand_;
  bool columnwise_;
  const std::int32_t* last_end_;  // of groups of rows; null: there are none
  std::int64_t count_;            // of amaxes
  float* current_;
};

// Returns the arguments of a cast of x, without a direction.
QuantizeArgs args_of(const TensorRef& x);
// Returns whether the operands are such that preset kernels write them.
bool fits_preset(const QuantizeArgs& args);

struct PlannedCast {
  PlannedCast(const TensorRef& of, const Operand* rowwise, const Operand* columnwise);

  // Returns whether there is nothing to cast.
  bool is_empty() const;
  // Returns whether both directions need the same amax: that of all values, untransformed.
  bool shares_amax() const {
    return row.needs_untransformed_amax(false) && col.needs_untransformed_amax(false);
  }
  // Leaves the amaxes to a preset kernel, which may compute the values that it casts. Returns false
  // where the kernel cannot find one that the scales need, or its conditions do not hold.
  bool leave_amaxes_to_cast();
  // Finds the amaxes that are wanted before the cast, completes `args`, and clears the padding of
  // swizzled scales.   scratch: of scratch_bytes(), which casts of computed values do not need
  void find_amaxes(std::byte* scratch, const Execution& execution);
  std::size_t scratch_bytes() const;
  // Finds the amaxes, and launches the kernels.
  void run(const Execution& execution);

  TensorRef x;
  PlannedOperand row, col;
  QuantizeArgs args;
  LaunchCast launch = nullptr;  // of all directions; null: each has its own
  LaunchCast launch_row = nullptr, launch_col = nullptr;
  bool reads_columns;          // for Operand::amaxes_of_columns, which the cast does not find
  bool writes_groups = false;  // the cast writes no outputs of groups without rows

 private:
  void read_amaxes(const Execution& execution) const;
};

// Makes the plan of a cast to FP4, of rows or of columns, write FP8. Returns false, and changes
// nothing, where the operand's width or alignment does not allow that.
//   row_amax: of the operand's rows, which are columns of x where it is columnwise
inline bool write_as_fp8(KernelOperand& plan, const std::uint32_t* row_amax) {
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(plan.codes) % kVec == 0;
  if (plan.padded % kVec != 0 || !is_aligned) return false;
  plan.code_pitch = plan.padded;
  plan.row_amax = row_amax;
  plan.row_scale = static_cast<float*>(plan.scale);
  return true;
}

}  // namespace minifloat::cuda
