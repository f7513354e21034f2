// The groups of rows that ops take (core/groups.h): a table of them, on the device of the operand,
// and the unit of groups along the contraction dimension.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <optional>
#include <string>

#include "minifloat/groups.h"
#include "minifloat/spec.h"
#include "minifloat/tensor_ref.h"

namespace minifloat::torch_ops {

using at::Tensor;

// The groups of values or of an operand. Arguments of ops; the table is that of group_table.
struct Groups {
  std::optional<Tensor> table = {};  // int32 (kGroupTableRows, groups + 1); none: no groups
  // Of values: the unit of the columnwise operand, if larger than the spec's. Of an operand: the
  // unit of its columns; 0: groups lie along rows.
  std::int64_t unit = 0;
  // Of values: the row of x of each row that is cast, int32 (rows); none: its position.
  std::optional<Tensor> rows_from = {};

  c10::SymInt count() const { return table->sym_size(1) - 1; }
};

// Requires a table of at most kMostGroups groups on the device of `like`, and a unit.
void check_groups(const char* op, const Groups& groups, const Tensor& like);

// Returns the rows that are cast of x, (rows, cols) or (batch, rows, cols).
inline c10::SymInt rows_of(const Tensor& x, const Groups& groups) {
  return groups.rows_from ? groups.rows_from->sym_size(0) : x.sym_size(-2);
}

// Sets the groups of values, and where their rows come from. The tensors must outlive `to`. Rows of
// the CPU are checked.
void set_groups(const char* op, const Groups& groups, std::int64_t unit, TensorRef& to);

// Returns the unit of a columnwise operand: the larger of the spec's own and the one requested.
inline int unit_of(const Spec& spec, const Groups& groups) {
  return std::max(spec.group_unit(), static_cast<int>(groups.unit));
}

// Returns the table as the torch-free API takes it. The tensor must outlive it.
GroupTable group_table_of(const char* op, const Groups& groups, std::int64_t unit);

// Returns the op group_table of offs, int32 (groups), among `rows` rows. op: the caller, which the
// errors of check_groups name
Tensor group_table(const std::string& op, const Tensor& offs, const c10::SymInt& rows);

}  // namespace minifloat::torch_ops
