// CUDA's sum of messages, on execution.stream.
#pragma once

#include "minifloat/messages.h"

namespace minifloat::cuda {

void sum_messages(const Messages& messages, const MessageLayout& layout, DType dtype, void* out,
                  const Execution& execution);

}  // namespace minifloat::cuda
