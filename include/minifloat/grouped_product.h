// Products of FP8 codes whose rows lie in groups (minifloat/groups.h), on a Hopper GPU.
#pragma once

#include <cstdint>

#include "minifloat/groups.h"
#include "minifloat/spec.h"
#include "minifloat/tensor_ref.h"

namespace minifloat {

// An operand of a grouped product: codes of rows of `pitch` bytes, and their fp32 scales, one a row
// or one a group. Scales of groups along the contraction dimension are (groups, rows).
struct GroupedFp8Operand {
  Elements elements;  // kE4m3 or kE5m2
  const std::uint8_t* codes = nullptr;
  const float* scale = nullptr;
  bool has_row_scales = false;
};

// Along rows (unit 0): a (m, k), whose rows lie in groups, times b (groups, n, k)ᵀ, to out (m, n).
// Along the contraction dimension: a (m, k) times b (n, k)ᵀ, whose columns lie in groups, to out
// (groups, m, n). n and k are multiples of 16, and buffers start at multiples of 16 bytes.
struct GroupedFp8Product {
  GroupedFp8Operand a, b;
  GroupTable groups;
  std::int64_t m = 0, n = 0, k = 0;
  bool fast = false;             // accumulates in the tensor cores' fewer bits
  std::uint16_t* out = nullptr;  // bf16
};

// Returns whether this build has the kernels.
bool has_grouped_fp8();

// Computes the product, rounded once; nothing of rows past the last group is read or written.
void grouped_fp8_product(const GroupedFp8Product& product, const Execution& execution);

}  // namespace minifloat
