// The plan of a cast whose FP4 operands are written as FP8, by the amaxes of their rows, which are
// columns of x where an operand is columnwise.
#pragma once

#include <cstdint>

#include "cuda/quantize/cast_vec16.cuh"
#include "fp4_cast.h"

namespace minifloat::cuda {

// A copy of an operand that is written as FP4, whose cast quantize_by plans; or null.
class OperandInFp4 {
 public:
  explicit OperandInFp4(const Operand* operand) : is_present_(operand != nullptr) {
    if (operand) copy_ = *operand;
    copy_.as_fp8 = false;
  }
  const Operand* get() const { return is_present_ ? &copy_ : nullptr; }

 private:
  bool is_present_;
  Operand copy_;
};

// Makes the plan of a cast to FP4, of rows or of columns, write FP8. Returns false, and changes
// nothing, where the operand's width or alignment does not allow that.
inline bool write_as_fp8(KernelOperand& plan, const std::uint32_t* row_amax) {
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(plan.codes) % kVec == 0;
  if (plan.padded % kVec != 0 || !is_aligned) return false;
  plan.code_pitch = plan.padded;
  plan.row_amax = row_amax;
  plan.row_scale = static_cast<float*>(plan.scale);
  return true;
}

}  // namespace minifloat::cuda
