// Transforms of values, of scale layouts and of packed codes.
#pragma once

#include <cstdint>

#include "minifloat/core/hadamard.h"
#include "minifloat/tensor_ref.h"

namespace minifloat {

// Writes the randomised Hadamard transform (core/hadamard.h) of x along its columns, or of xᵀ along
// x's rows.
//   points: 16, 32, 64 or 128.   signs: 16 bits; +rht's are kHadamardSigns
//   out: bf16 (batch, rows as read, round_up(cols as read, points)); (C, L) of groups columnwise,
//   whose unit is a multiple of points
void hadamard(const TensorRef& x, int points, bool columnwise, std::uint32_t signs,
              std::uint16_t* out, const Execution& execution = {});

// The cut of a scale matrix into groups before it is laid out (core/swizzle.h).
enum class ScaleGroups { kNone, kAlongM, kAlongK };

// One-byte scales (batch, rows, cols). offsets: (groups) int32, each group's end among rows
// (kAlongM) or columns (kAlongK), in the tensors' device memory. Empty groups are legal. Offsets on
// the CPU are checked.
struct ScaleMatrix {
  std::int64_t batch = 1;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  ScaleGroups kind = ScaleGroups::kNone;
  const std::int32_t* offsets = nullptr;
  std::int64_t groups = 0;
  Device device = Device::kCpu;

  std::int64_t swizzled_bytes() const;  // of one matrix
};

// Convert scale (batch, rows, cols) to out (batch, swizzled_bytes), zero padded, and back.
void swizzle_scales(const ScaleMatrix& shape, const std::uint8_t* scale, std::uint8_t* out,
                    const Execution& execution = {});
void unswizzle_scales(const ScaleMatrix& shape, const std::uint8_t* swizzled, std::uint8_t* out,
                      const Execution& execution = {});

// Packed 4-bit codes of a (batch, rows, cols) operand: ceil(cols / 2) bytes a row.
struct CodeMatrix {
  const std::uint8_t* codes = nullptr;
  std::int64_t batch = 1;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  Device device = Device::kCpu;
};

// Writes the packed codes of the transpose, (batch, cols, ceil(rows / 2)); the last nibble of an
// odd row is zero.
void transpose_nibbles(const CodeMatrix& codes, std::uint8_t* out, const Execution& execution = {});

}  // namespace minifloat
