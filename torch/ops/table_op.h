// The name of the op that builds a table of groups, for the errors of check_groups.
#pragma once

namespace minifloat::torch_ops {

// Names the op that calls group_table on this thread, until the end of a scope. Without one, and in
// compiled code, errors name group_table.
class TableOp {
 public:
  explicit TableOp(const char* op);
  ~TableOp();
  TableOp(const TableOp&) = delete;
  TableOp& operator=(const TableOp&) = delete;

 private:
  const char* former_;
};

}  // namespace minifloat::torch_ops
