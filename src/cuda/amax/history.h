// The amax histories of delayed scaling on the device.
#pragma once

#include "minifloat/amax_history.h"

namespace minifloat::cuda {

void roll_amax_histories(const AmaxHistories& histories, const Execution& execution);

}  // namespace minifloat::cuda
