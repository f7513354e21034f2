// The CPU's sum of messages.
#pragma once

#include "minifloat/messages.h"

namespace minifloat::cpu {

void sum_messages(const Messages& messages, const MessageLayout& layout, DType dtype, void* out,
                  const Execution& execution);

}  // namespace minifloat::cpu
