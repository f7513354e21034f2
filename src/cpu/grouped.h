// A group of rows as a matrix of its own: the CPU backend casts groups one after the other.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "minifloat/quantize.h"
#include "minifloat/tensor_ref.h"

namespace minifloat::cpu {

// The place of a group: rows [begin, end) of x, and `cols` columns of the columnwise operand, from
// `first_col` on, where that has a unit.
struct Group {
  std::int64_t index, begin, end, first_col, cols;
};

// Calls f(group) for each group.
template <class F>
void each_group(const GroupTable& groups, F f) {
  const std::int32_t* const rows = groups.of_rows();
  const std::int32_t* const cols = groups.under(groups.unit);
  for (int e = 0; e < groups.count; ++e)
    f(Group{e, rows[e], rows[e + 1], cols[e], cols[e + 1] - cols[e]});
}

inline std::int64_t bytes_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Returns the rows of a group, without groups.
inline TensorRef rows_of(const TensorRef& x, const Group& group) {
  TensorRef rows = x;
  rows.data = static_cast<const char*>(x.data) + group.begin * x.row_stride * bytes_of(x.dtype);
  rows.rows = group.end - group.begin;
  rows.groups = {};
  return rows;
}

// A copy of the rows that rows_from names, in their order, up to the last group's end.
class GatheredRows {
 public:
  explicit GatheredRows(const TensorRef& x) : x_(x) {
    const std::int64_t bytes = x.cols * bytes_of(x.dtype), end = x.groups.of_rows()[x.groups.count];
    memory_.resize(static_cast<std::size_t>(end * bytes));
    for (std::int64_t r = 0; bytes > 0 && r < end; ++r)
      std::memcpy(
          memory_.data() + r * bytes,
          static_cast<const char*>(x.data) + x.rows_from[r] * x.row_stride * bytes_of(x.dtype),
          static_cast<std::size_t>(bytes));
    x_.data = memory_.data();
    x_.row_stride = x.cols;
    x_.rows_from = nullptr;
  }
  const TensorRef& x() const { return x_; }

 private:
  TensorRef x_;
  std::vector<char> memory_;
};

// Returns the index of a group's first amax.   rows: as read
inline std::int64_t first_amax(const Spec& spec, const Group& group, std::int64_t rows,
                               bool columnwise) {
  if (spec.has_row_amax()) return columnwise ? group.index * rows : group.begin;
  return spec.has_tensor_amax() ? group.index : 0;
}

// Returns a group's part of an operand of x, whose buffers and positions begin with the group.
inline Operand operand_of(const TensorRef& x, const Operand& operand, const Group& group,
                          bool columnwise) {
  const Spec& spec = operand.spec;
  const std::int64_t rows = columnwise ? x.cols : x.rows;
  const std::int64_t row = columnwise ? 0 : group.begin, col = columnwise ? group.first_col : 0;
  const std::int64_t padded = spec.padded_cols(x.cols);  // of the rowwise operand
  const std::int64_t amax = first_amax(spec, group, rows, columnwise);
  std::int64_t scale = amax;
  if (spec.has_blocks()) scale = row * spec.scale_cols(x.cols) + col / spec.block_cols;

  Operand part = operand;
  if (operand.given_amax) part.given_amax += amax;
  if (operand.amax) part.amax += amax;
  if (operand.history.first) part.history.first += amax * operand.history.stride;
  if (operand.codes) part.codes += row * spec.code_cols(x.cols) + col * spec.code_bits() / 8;
  part.scale = static_cast<char*>(operand.scale) + scale * spec.scale_bytes();
  if (operand.decoded) part.decoded += row * padded + col;
  if (operand.random.row_ids)
    part.random.row_ids += row;
  else
    part.origin.row += columnwise ? group.index * rows : row;
  return part;
}

}  // namespace minifloat::cpu
