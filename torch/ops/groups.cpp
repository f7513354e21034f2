// The ops group_table and check_groups, and the checks of the groups that other ops take.
#include "ops/groups.h"

#include <ATen/ATen.h>

#include <atomic>
#include <string>

#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/op.h"

namespace minifloat {
namespace torch_ops {
namespace {

using c10::SymInt;

std::atomic<bool> checks_ends = false;

constexpr const char* kGroupTable = "group_table";

// Raises for ends that the table would move. Copies them to the host.
void check_ends(const std::string& op, const Tensor& offs, std::int64_t rows) {
  const Tensor on_host = offs.cpu();
  const std::int32_t* const ends = on_host.const_data_ptr<std::int32_t>();
  std::int32_t begin = 0;
  for (std::int64_t e = 0; e < on_host.numel(); ++e) {
    TORCH_CHECK_VALUE(begin <= ends[e] && ends[e] <= rows, printable(op),
                      ": expected ends of groups that rise from 0 to ", rows, " at most, got ",
                      ends[e], " for group ", e, " after ", begin);
    begin = ends[e];
  }
}

// op: the caller, for the errors of check_ends
Tensor group_table_kernel(const Tensor& offs, SymInt sym_rows, const std::string& op) {
  TORCH_CHECK_VALUE(offs.scalar_type() == at::kInt && offs.dim() == 1, kGroupTable,
                    ": expected offs as int32 (groups), got ", offs.scalar_type(), " ",
                    offs.sym_sizes());
  bridge::check_size(kGroupTable, "rows", sym_rows);
  const auto groups = offs.sym_size(0).maybe_as_int();
  TORCH_CHECK_VALUE(!groups || *groups <= kMostGroups, kGroupTable, ": expected at most ",
                    kMostGroups, " groups, got ", offs.sym_size(0));
  const Tensor table =
      at::empty_symint({SymInt(kGroupTableRows), offs.sym_size(0) + 1}, offs.options());
  if (table.is_meta()) return table;
  const std::int64_t rows = sym_rows.guard_int(__FILE__, __LINE__);
  bridge::check_memory(kGroupTable, "offs", offs);
  const Tensor ends = offs.contiguous();
  if (checks_ends) check_ends(op, ends, rows);
  bridge::with_value_errors([&] {
    build_group_table(ends.const_data_ptr<std::int32_t>(), ends.size(0), rows,
                      table.mutable_data_ptr<std::int32_t>(), bridge::backend_of(offs),
                      bridge::ExecutionOn(offs));
  });
  return table;
}

const Op group_table_op(kGroupTable, group_table_kernel, skipped());

bool set_checks_ends(bool enabled) { return checks_ends.exchange(enabled); }

}  // namespace

void check_groups(const char* op, const Groups& groups, const Tensor& like) {
  TORCH_CHECK_VALUE(groups.unit == 0 || is_group_unit(groups.unit), op,
                    ": expected group_unit 0, 16, 32, 64 or 128, got ", groups.unit);
  if (!groups.table) {
    TORCH_CHECK_VALUE(groups.unit == 0, op, ": expected group_unit 0 without groups, got ",
                      groups.unit);
    TORCH_CHECK_VALUE(!groups.rows_from, op, ": expected no rows_from without groups");
    return;
  }
  const Tensor& table = *groups.table;
  TORCH_CHECK_VALUE(table.scalar_type() == at::kInt && table.dim() == 2 &&
                        table.sym_size(0) == kGroupTableRows && table.sym_size(1) >= 1,
                    op, ": expected groups as group_table returns them, int32 (", kGroupTableRows,
                    ", groups + 1), got ", table.scalar_type(), " ", table.sym_sizes());
  TORCH_CHECK_VALUE(table.device() == like.device(), op, ": expected groups on ", like.device(),
                    ", got ", table.device());
  if (!groups.rows_from) return;
  const Tensor& from = *groups.rows_from;
  TORCH_CHECK_VALUE(from.scalar_type() == at::kInt && from.dim() == 1, op,
                    ": expected rows_from as int32 (rows), got ", from.scalar_type(), " ",
                    from.sym_sizes());
  bridge::check_same_device(op, "rows_from", from, like);
}

void set_groups(const char* op, const Groups& groups, std::int64_t unit, TensorRef& to) {
  to.groups = group_table_of(op, groups, unit);
  if (!groups.rows_from) return;
  const Tensor& from = *groups.rows_from;
  bridge::check_memory(op, "rows_from", from);
  TORCH_CHECK_VALUE(from.is_contiguous(), op, ": expected contiguous rows_from, got strides ",
                    from.strides());
  to.from_rows = to.rows;
  to.rows = from.size(0);
  to.rows_from = from.const_data_ptr<std::int32_t>();
}

GroupTable group_table_of(const char* op, const Groups& groups, std::int64_t unit) {
  if (!groups.table) return {};
  const Tensor& table = *groups.table;
  bridge::check_memory(op, "groups", table);
  TORCH_CHECK_VALUE(table.is_contiguous() && table.size(1) - 1 <= kMostGroups, op,
                    ": expected contiguous groups, ", kMostGroups, " at most, got ",
                    table.size(1) - 1, " with strides ", table.strides());
  return {table.const_data_ptr<std::int32_t>(), static_cast<int>(table.size(1) - 1),
          static_cast<int>(unit)};
}

Tensor group_table(const std::string& op, const Tensor& offs, const SymInt& rows) {
  if (rows.maybe_as_int() && can_skip_dispatcher({&offs}))
    return group_table_kernel(offs, rows, op);
  return group_table_op(offs, rows, op);
}

TORCH_LIBRARY_IMPL(minifloat, CatchAll, m) { m.impl("check_groups", set_checks_ends); }

}  // namespace torch_ops
}  // namespace minifloat
