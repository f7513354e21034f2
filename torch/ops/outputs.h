// What ops allocate for their results.
#pragma once

#include <ATen/core/Tensor.h>

#include "minifloat/spec.h"

namespace minifloat::torch_ops {

// Asks for huge pages: the first write to fresh memory faults once a page, and at 4 KiB a page the faults of a large
// output take longer than its values do. The kernel may refuse, which changes nothing.
void advise_huge_pages(const at::Tensor& output);

// On the device of `like`.
at::Tensor empty(const at::Tensor& like, c10::SymIntArrayRef shape, at::ScalarType dtype);

// One-byte scales travel as bytes: torch has neither arithmetic nor collectives for their own dtypes. The Python
// package shows them as float8_e4m3fn and float8_e8m0fnu, and both forms are taken back.
at::ScalarType scale_dtype(const Spec& spec);
bool is_scale_dtype(at::ScalarType dtype, const Spec& spec);

// How many scales an operand has that is read (rows, cols).
template <class Int>
Int scales_of(const Spec& spec, const Int& rows, const Int& cols) {
  if (spec.has_blocks()) return spec.scale_rows(rows) * spec.scale_cols(cols);
  return spec.has_row_amax() ? rows : Int(1);
}

}  // namespace minifloat::torch_ops
