// Amax histories of delayed scaling: raised by each cast, rolled once a step
// (core/amax_history.h).
#pragma once

#include <cstdint>
#include <span>

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

// An amax that a cast found, and the entry of a history for the step's current amax.
struct FoundAmax {
  float* entry = nullptr;
  const float* amax = nullptr;
};

// Raises each entry to its amax, one after the other.
void raise_amaxes(std::span<const FoundAmax> found, Device device, const Execution& execution = {});

}  // namespace minifloat
