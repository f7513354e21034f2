// Amax histories of delayed scaling, rolled once a step (core/amax_history.h).
#pragma once

#include <cstdint>

#include "minifloat/core/scaling.h"
#include "minifloat/tensor_ref.h"

namespace minifloat {

// The amax histories of several operands: (count, 1 + length) float32, one row an operand.
struct AmaxHistories {
  float* rows = nullptr;
  std::int64_t count = 0;
  int length = 0;
  DelayedAmax algorithm = DelayedAmax::kMax;
  int margin = 0;  // powers of two
  Device device = Device::kCpu;
};

// Rolls each row in place.
void roll_amax_histories(const AmaxHistories& histories, const Execution& execution = {});

}  // namespace minifloat
