// amax, quantize and dequantize: pure functions of (values, spec, seed, position).
//
// "As read" is the matrix itself rowwise, and its transpose columnwise: a columnwise operand of x
// (R, C) is read (C, R), and codes, scales and positions are those of that matrix. The buffers'
// shapes, for an operand read (rows, cols), with a leading batch:
//
//     codes     (rows, spec.code_cols(cols)) bytes; 4-bit: two a byte, the even column in the low
//               nibble
//     scale     fp32: () or (rows) or (block rows, block cols)
//               E8M0, E4M3: (block rows, block cols) bytes; Operand::swizzled: in core/swizzle.h's
//               layout
//     amax      fp32: () for tensor scaling and NVFP4, (rows) for row scaling; after the transform
//     decoded   bf16: (rows, spec.padded_cols(cols)), the values of the codes for an exact product
//
// An x of (1000, 4096) under nvfp4 is read (4096, 1000) columnwise: codes (4096, 500), scale
// (4096, 63), amax (). Buffers are contiguous, aligned as their elements, and overlap neither x nor
// each other. CUDA's faster kernels need rows of x and of codes at multiples of 16 bytes.
//
// Where the rows of x lie in E groups (core/groups.h), columnwise cols are L, and each group has a
// tensor's scale and amax: (E). Of a row it has one as well where groups lie along the contraction
// dimension: (E, rows). Nothing of a row past the last group is read or written.
#pragma once

#include <cstdint>
#include <span>

#include "minifloat/spec.h"
#include "minifloat/tensor_ref.h"

namespace minifloat {

// The source of the bits of stochastic rounding, and of the signs of +eden. `state` is in the
// tensors' device memory: (seed, count), and with state_size 3 (seed, count, module stream), which
// is xor-ed to `stream`. The key is mix_seed(seed, count).
struct Random {
  const std::int64_t* state = nullptr;
  int state_size = 0;
  std::uint64_t stream = 0;
  // Of each row as read, its row in the random counter; null: its position. Rowwise groups alone.
  const std::int32_t* row_ids = nullptr;
};

// The position of the operand's first element within the whole that it is a shard of, as read.
// Under stochastic rounding col is a multiple of 16, and of the transform's points.
struct Origin {
  std::int64_t row = 0;
  std::int64_t col = 0;
};

// Entries of an amax history: that of part i of an operand is first[i * stride].
struct HistoryEntries {
  float* first = nullptr;
  std::int64_t stride = 1;
};

// One direction of a quantization: the spec and the buffers, all of x's device.
struct Operand {
  Spec spec;
  const float* given_amax = nullptr;  // shaped as amax; null: computed from the values
  Random random;                      // required by +sr
  Origin origin;
  std::uint8_t* codes = nullptr;  // null beside `decoded`: not written
  void* scale = nullptr;
  // The active amax; under +delayed the current amax, for the history. null: not written.
  float* amax = nullptr;
  HistoryEntries history;            // raised to the current amax of +delayed; null: none
  std::uint16_t* decoded = nullptr;  // at a multiple of 16 bytes; null: not written
  // Of a rowwise operand under e4m3/row: max |x| of each column, (batch, cols) or (groups, cols),
  // which a later columnwise cast takes as given_amax; null: not written.
  float* amaxes_of_columns = nullptr;
  // The bytes from a row's codes to the next row's, and from its scales to the next row's, of one
  // rowwise matrix with blocks of one row; 0: rows follow each other without gaps.
  std::int64_t row_bytes = 0;
  // Whether 4-bit codes under powers of two are written as fp4_as_fp8 would convert them: `codes`
  // are E4M3, (rows, padded_cols), and `scale` is the fp32 row scales. Then nothing is decoded.
  bool as_fp8 = false;
  // Whether one-byte scales of blocks are written as swizzle_scales would lay them out, with its
  // zeros: (batch, swizzled_size(rows, block columns)) bytes, those of 2D blocks once for each row.
  // Of matrices without groups and row_bytes.
  bool swizzled = false;
};

// One direction of x whose amax is wanted.
struct AmaxOf {
  Spec spec;
  bool columnwise = false;
  Random random = {};  // required by +eden, whose transform draws its signs
};
// Writes max |x| as the spec takes it. out: shaped as amax above.
void amax(const TensorRef& x, const AmaxOf& of, float* out, const Execution& execution = {});

// Quantizes x in both directions from one read; null: that direction is not cast. Throws Error
// where a spec cannot take the input, before anything is written.
void quantize(const TensorRef& x, const Operand* rowwise, const Operand* columnwise,
              const Execution& execution = {});

// A quantized operand: matrices read (rows, cols).
struct Quantized {
  Spec spec;
  const std::uint8_t* codes = nullptr;
  const void* scale = nullptr;
  const float* amax = nullptr;  // required for NVFP4: the amaxes that the scales were made with
  std::int64_t batch = 1;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  Device device = Device::kCpu;
  GroupTable groups = {};  // with a batch of 1

  // Returns the number of parts that have a tensor scale each: matrices or groups.
  std::int64_t parts() const { return groups ? groups.count : batch; }
  // Returns the number of its rows, those of each group along the contraction dimension.
  std::int64_t all_rows() const { return (groups.unit > 0 ? parts() : batch) * rows; }
  // Returns the number of its tensor scales: one a part, or one a row beside the scales of blocks.
  std::int64_t factors() const { return spec.has_outer_row_amax() ? all_rows() : parts(); }
};

// Writes the operand's values: fl32(code * scale), and for NVFP4 fl32(fl32(code * scale) * fl32(1 /
// S)). Transformed operands stay transformed.
//   out: (batch, rows, padded_cols), in fp32 or rounded to bf16; not written outside of groups
void dequantize(const Quantized& operand, DType dtype, void* out, const Execution& execution = {});

// Writes the bf16 values that an exact product multiplies: code * scale where the scale is a power
// of two or NVFP4's block scale; the code alone where the scale of the tensor or of a row is any
// fp32. The pending factor is then `tensor_factor`, or the row scale. Exact for 2^-126 <= |v| <=
// bf16's max; below: zero; above: saturated. Throws where a block's scale is any fp32: the product
// reads the fp32 values of dequantize.
void decode_for_product(const Quantized& operand, std::uint16_t* out,
                        const Execution& execution = {});

// Writes the pending factors of this operand in an exact product: the tensor scales, of rows under
// nvfp4/row.   out: (factors)
void tensor_factor(const Quantized& operand, float* out, const Execution& execution = {});

// Writes {0, factor of a * factor of b}, the factors as in tensor_factor: beta and alpha of an
// exact product. a, b: of one device, with one factor each; a default Quantized of the device has
// the factor 1.   out: (2)
void product_factor(const Quantized& a, const Quantized& b, float* out,
                    const Execution& execution = {});

// A 4-bit operand whose block scales are powers of two, and the memory of its
// E4M3 codes under one fp32 scale a row.
struct Fp4AsFp8Cast {
  Quantized operand;
  std::uint8_t* codes = nullptr;  // (batch, rows, padded_cols) bytes
  // (batch, rows), the tensor's scale included; (groups, rows) of groups along the contraction
  // dimension
  float* row_scale = nullptr;
};
// Converts operands to the form that an FP8 product multiplies (core/fp4_as_fp8.h). Exact where a
// block's scale is at least 2^-14 of the largest of its row; below, within 2^-16 of that largest
// scale. On CUDA the two operands of a product take one launch.
void fp4_as_fp8(std::span<const Fp4AsFp8Cast> operands, const Execution& execution = {});
inline void fp4_as_fp8(const Fp4AsFp8Cast& operand, const Execution& execution = {}) {
  fp4_as_fp8(std::span(&operand, 1), execution);
}

}  // namespace minifloat
