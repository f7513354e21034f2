// Allocation of the results of ops, and the dtypes and numbers of scales.
#pragma once

#include <ATen/core/Tensor.h>

#include "minifloat/spec.h"

namespace minifloat::torch_ops {

// Advises the operating system to back an output by huge pages. The first write to a new page
// faults: at 4 KiB a page the faults of a large output take longer than the cast. Results do not
// depend on the advice.
void advise_huge_pages(const at::Tensor& output);

// Returns uninitialized memory on the device of `like`.
at::Tensor empty(const at::Tensor& like, c10::SymIntArrayRef shape, at::ScalarType dtype);

// Returns *t, or an empty tensor where there is none: arguments and results of an op are defined.
at::Tensor or_empty(const at::Tensor* t, const at::Tensor& like);

// Returns the dtype of the scales that ops return: float32, or uint8 for one-byte scales, whose own
// dtypes torch has no arithmetic or collectives for.
at::ScalarType scale_dtype(const Spec& spec);
// Whether ops accept scales of this dtype: that of scale_dtype, or for one-byte scales
// float8_e4m3fn or float8_e8m0fnu, as which the Python package shows them.
bool is_scale_dtype(at::ScalarType dtype, const Spec& spec);

// Returns the number of scales of an operand that is (rows, cols) as read.
template <class Int>
Int scales_of(const Spec& spec, const Int& rows, const Int& cols) {
  if (spec.has_blocks()) return spec.scale_rows(rows) * spec.scale_cols(cols);
  return spec.has_row_amax() ? rows : Int(1);
}

}  // namespace minifloat::torch_ops
