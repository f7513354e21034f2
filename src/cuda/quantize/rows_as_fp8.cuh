// The plan of a cast whose FP4 operands are written as FP8, by the amaxes of their rows.
#pragma once

#include <cstdint>

#include "cuda/quantize/cast_vec16.cuh"
#include "fp4_cast.h"

namespace minifloat::cuda {

// An operand as a cast to FP4, which quantize_by plans; or null.
class AsFp4 {
 public:
  explicit AsFp4(const Operand* operand) : is_present_(operand != nullptr) {
    if (operand) copy_ = *operand;
    copy_.as_fp8 = false;
  }
  const Operand* get() const { return is_present_ ? &copy_ : nullptr; }

 private:
  bool is_present_;
  Operand copy_;
};

// Makes a plan to FP4 write FP8. Returns whether its width and alignment allow that.
inline bool write_as_fp8(KernelOperand& plan, const std::uint32_t* row_amax) {
  plan.code_pitch = plan.padded;
  plan.row_amax = row_amax;
  plan.row_scale = static_cast<float*>(plan.scale);
  return plan.padded % kVec == 0 && reinterpret_cast<std::uintptr_t>(plan.codes) % kVec == 0;
}

}  // namespace minifloat::cuda
