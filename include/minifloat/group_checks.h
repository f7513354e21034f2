// The check of a table of groups that a caller passes (minifloat/groups.h).
#pragma once

#include <cstdint>

#include "minifloat/groups.h"

namespace minifloat {

// Throws Error for a table on the CPU with other boundaries than build_group_table writes: they are
// places in memory. A table on another device is not copied to the host.
//   unit: of the boundaries that are read; 0: those among rows.   most: the last that is legal
void check_group_table(const char* function, const GroupTable& groups, Device device, int unit,
                       std::int64_t most);

}  // namespace minifloat
