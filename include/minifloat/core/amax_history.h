// One step of an amax history of delayed scaling.
#pragma once

#include "minifloat/core/scaling.h"

namespace minifloat {

// row: (1 + length), the active amax, then the amaxes of steps, the newest first; length is at least 1. The next step's
// active amax replaces the first, and a new step begins: the others move on by one, and the newest is 0.
MINIFLOAT_HD constexpr void roll_amax_history(float* row, int length, DelayedAmax algorithm,
                                              int margin) {
  row[0] = delayed_amax(row + 1, length, algorithm, margin, row[0]);
  for (int i = length; i > 1; --i) row[i] = row[i - 1];
  row[1] = 0.0f;
}

}  // namespace minifloat
