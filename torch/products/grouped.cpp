#include "products/grouped.h"

#include <ATen/ATen.h>

#include "ops/direct.h"

namespace minifloat::torch_ops {

Tensor ends_of(const Groups& groups, std::int64_t unit) {
  return groups.table->select(0, group_table_row(static_cast<int>(unit))).slice(0, 1);
}

Tensor group_of_rows(const Groups& groups, std::int64_t rows) {
  const Tensor ends = ends_of(groups, 0);
  const Tensor row = at::arange(rows, ends.options());
  return at::searchsorted(ends, row, /*out_int32=*/false, /*right=*/true)
      .clamp_max(ends.size(0) - 1);
}

Tensor add_group_bias(const Tensor& sums, const Groups& groups, const Result& result) {
  if (!result.bias) return to_dtype(sums, result.dtype);
  const Tensor bias = to_dtype(*result.bias, result.dtype);
  const Tensor of_rows = bias.index_select(0, group_of_rows(groups, sums.size(0)));
  return to_dtype(sums.add(of_rows), result.dtype);
}

}  // namespace minifloat::torch_ops
