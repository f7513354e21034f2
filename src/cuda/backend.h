// The CUDA backend: the functions of backends.h, and those that it has alone. state/state.h has the
// signatures of amax_history.h and random_state.h.
#pragma once

#include "backends.h"

namespace minifloat::cuda {

void build_group_table(const std::int32_t* offs, std::int64_t groups, std::int64_t rows,
                       std::int32_t* table, const Execution& execution);
void clear_past_groups(const GroupTable& groups, void* rows, std::int64_t row_bytes,
                       std::int64_t count, const Execution& execution);
// Writes the amax of each row and of each column of a batch, from one read; of groups, of each
// column of each group.
//   of_rows: (batch, rows), of_columns: (batch, cols), or (groups, cols)
void amax_of_rows_and_columns(const TensorRef& x, float* of_rows, float* of_columns,
                              const Execution& execution);
// Writes the amax of a bf16 matrix without groups, and that of its columns as `columns` transforms
// them, from one read.   of_values, of_columns: (1)
void amax_of_values_and_columns(const TensorRef& x, const AmaxOf& columns, float* of_values,
                                float* of_columns, const Execution& execution);

}  // namespace minifloat::cuda
