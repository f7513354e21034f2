// Products of operands whose rows lie in groups (minifloat/groups.h), on a Hopper GPU.
#pragma once

#include <cstdint>

#include "minifloat/groups.h"
#include "minifloat/spec.h"
#include "minifloat/tensor_ref.h"

namespace minifloat {

// The parts of a grouped operand that have one fp32 scale each, and the shape of the scales. L: the
// columns of blocks.
enum class GroupScales : std::uint8_t {
  kNone,
  kGroups,   // (groups)
  kRows,     // (rows); of one matrix a group (groups, rows); along the contraction (groups, rows)
  k1x128,    // (rows, L); along the contraction dimension transposed, (L, rows), under unit 128
  k128x128,  // one matrix a group: (groups, rows / 128, L), both rounded up
};

// An operand of a grouped product: contiguous rows of codes, or of bf16 values, and their scales.
struct GroupedOperand {
  Elements elements = Elements::kE4m3;  // kE4m3, kE5m2 or kBf16
  const void* values = nullptr;
  const float* scale = nullptr;
  GroupScales scales = GroupScales::kNone;
};

// Along rows (unit 0): a (m, k), whose rows lie in groups, times b (groups, n, k)ᵀ, to out (m, n).
// Along the contraction dimension: a (m, k) times b (n, k)ᵀ, whose columns lie in groups, to out
// (groups, m, n). Rows of a, b and out start at multiples of 16 bytes: the lengths and addresses
// are checked before anything runs, and that `out` shares no memory with what is read.
struct GroupedProduct {
  GroupedOperand a, b;
  GroupTable groups;
  std::int64_t m = 0, n = 0, k = 0;
  bool fast = false;                    // accumulates in the tensor cores' fewer bits
  const std::uint16_t* bias = nullptr;  // bf16 (groups, n), along rows; null: none
  std::uint16_t* out = nullptr;         // bf16
};

// Returns whether this build has the kernels.
bool has_grouped_products();

// Returns whether there is a kernel for the operands' elements and scales:
//
//     E4M3 or E5M2 times E4M3      scales of rows or groups, or none
//     bf16 times bf16              the same: pending factors
//     E4M3 times E4M3              k1x128 times k128x128 along rows
//                                  k1x128 times k1x128 along the contraction dimension
bool has_grouped_kernel(const GroupedOperand& a, const GroupedOperand& b, bool is_along_rows);

// Computes the product, rounded once; nothing of rows past the last group is read or written.
void grouped_product(const GroupedProduct& product, const Execution& execution);

}  // namespace minifloat
