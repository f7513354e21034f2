// One step of an amax history of delayed scaling.
#pragma once

#include <cstdint>

#include "minifloat/core/scaling.h"

namespace minifloat {

// Begins a new step: sets the active amax from the history, moves each amax on by one, and writes 0
// as the newest.
//   row: (1 + length), the active amax, then the amaxes of steps, newest first; length >= 1
MINIFLOAT_HD constexpr void roll_amax_history(float* row, int length, DelayedAmax algorithm,
                                              int margin) {
  row[0] = delayed_amax(row + 1, length, algorithm, margin, row[0]);
  for (int i = length; i > 1; --i) row[i] = row[i - 1];
  row[1] = 0.0f;
}

// Returns the larger of a current amax and one that was found, in any order; NaN if one is NaN. The
// bits of amaxes, which have no sign, are ordered as their values are, with NaN last.
MINIFLOAT_HD constexpr float larger_amax(float current, float found) {
  return bit_cast<std::int32_t>(found) > bit_cast<std::int32_t>(current) ? found : current;
}

}  // namespace minifloat
