// The sizes of an operand as read, and the shapes of its tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/SmallVector.h>

#include <initializer_list>
#include <optional>

#include "minifloat/core/groups.h"
#include "minifloat/core/swizzle.h"
#include "minifloat/spec.h"
#include "ops/groups.h"

namespace minifloat::torch_ops {

template <class Int>
using Sizes = c10::SmallVector<Int, 3>;

// Int may be symbolic.
template <class Int>
struct AsRead {
  std::optional<Int> batch, groups;  // none: one matrix, without groups
  Int rows, cols;
  bool columnwise;

  Sizes<Int> shape(std::initializer_list<Int> inner) const {
    Sizes<Int> sizes;
    if (batch) sizes.push_back(*batch);
    sizes.append(inner.begin(), inner.end());
    return sizes;
  }
  Sizes<Int> codes(const Spec& spec) const { return shape({rows, spec.code_cols(cols)}); }
  Sizes<Int> decoded(const Spec& spec) const { return shape({rows, spec.padded_cols(cols)}); }
  Sizes<Int> amax(const Spec& spec) const {
    if (spec.has_row_amax())
      return groups && columnwise ? Sizes<Int>{*groups, rows} : shape({rows});
    if (spec.has_tensor_amax()) return groups ? Sizes<Int>{*groups} : shape({});
    return {Int(0)};
  }
  Sizes<Int> scale(const Spec& spec) const {
    if (!spec.has_blocks()) return amax(spec);
    return shape({spec.scale_rows(rows), spec.scale_cols(cols)});
  }
  // Returns the shape of the same scales in the swizzled layout, which has one for each row: its
  // tiles, and the bytes of one. A dimension more than other scales have tells them apart.
  Sizes<Int> swizzled(const Spec& spec) const {
    return shape({ceil_div<Int>(rows, Int(kSwizzleTileRows)),
                  ceil_div<Int>(spec.scale_cols(cols), Int(kSwizzleTileCols)),
                  Int(kSwizzleTileRows * kSwizzleTileCols)});
  }
  // Returns the shape of the scales of FP4 that is written as FP8: one a row, or a row of a group.
  Sizes<Int> row_scale() const {
    return groups && columnwise ? Sizes<Int>{*groups, rows} : shape({rows});
  }
};

inline AsRead<c10::SymInt> as_read(const at::Tensor& x, const Spec& spec, bool columnwise,
                                   const Groups& groups) {
  AsRead<c10::SymInt> read = {.batch = {},
                              .groups = {},
                              .rows = columnwise ? x.sym_size(-1) : rows_of(x, groups),
                              .cols = columnwise ? rows_of(x, groups) : x.sym_size(-1),
                              .columnwise = columnwise};
  if (x.dim() == 3) read.batch = x.sym_size(0);
  if (!groups.table) return read;
  read.groups = groups.count();
  if (columnwise)
    read.cols =
        grouped_cols<c10::SymInt>(read.cols, c10::SymInt(unit_of(spec, groups)), *read.groups);
  return read;
}

}  // namespace minifloat::torch_ops
