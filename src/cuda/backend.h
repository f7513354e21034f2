// The CUDA backend: the signatures of minifloat/quantize.h, groups.h, transform.h and
// partial_cast.h, on device memory and on execution.stream. No call waits for the device or copies
// a number to the host. state/state.h has the signatures of amax_history.h and random_state.h.
#pragma once

#include "minifloat/partial_cast.h"
#include "minifloat/quantize.h"
#include "minifloat/transform.h"

namespace minifloat::cuda {

void build_group_table(const std::int32_t* offs, std::int64_t groups, std::int64_t rows,
                       std::int32_t* table, const Execution& execution);
void clear_past_groups(const GroupTable& groups, void* rows, std::int64_t row_bytes,
                       std::int64_t count, const Execution& execution);
void amax(const TensorRef& x, const AmaxOf& of, float* out, const Execution& execution);
// Writes the amax of each row and of each column of a batch, from one read; of groups, of each
// column of each group.
//   of_rows: (batch, rows), of_columns: (batch, cols), or (groups, cols)
void amax_of_rows_and_columns(const TensorRef& x, float* of_rows, float* of_columns,
                              const Execution& execution);
// Writes the amax of a bf16 matrix without groups, and that of its columns as `columns` transforms
// them, from one read.   of_values, of_columns: (1)
void amax_of_values_and_columns(const TensorRef& x, const AmaxOf& columns, float* of_values,
                                float* of_columns, const Execution& execution);
void quantize(const TensorRef& x, const Operand* rowwise, const Operand* columnwise,
              const Execution& execution);
void dequantize(const Quantized& operand, DType dtype, void* out, const Execution& execution);
void decode_for_product(const Quantized& operand, std::uint16_t* out, const Execution& execution);
void fp4_as_fp8(std::span<const Fp4AsFp8Cast> operands, const Execution& execution);
void tensor_factor(const Quantized& operand, float* out, const Execution& execution);
void product_factor(const Quantized& a, const Quantized& b, float* out, const Execution& execution);
void hadamard(const TensorRef& x, int points, bool columnwise, std::uint32_t signs,
              std::uint16_t* out, const Execution& execution);
void swizzle_scales(const ScaleMatrix& shape, const std::uint8_t* scale, std::uint8_t* out,
                    const Execution& execution);
void unswizzle_scales(const ScaleMatrix& shape, const std::uint8_t* swizzled, std::uint8_t* out,
                      const Execution& execution);
void transpose_nibbles(const CodeMatrix& codes, std::uint8_t* out, const Execution& execution);
void partial_amax(std::span<const PartialCast> casts, const Execution& execution);
void choose_scales(std::span<const PartialCast> casts, const Execution& execution);
void partial_cast(std::span<const PartialCast> casts, const Execution& execution);
void transpose_many(std::span<const Transpose> matrices, const Execution& execution);
void copy_many(std::span<const Copy> copies, const Execution& execution);

}  // namespace minifloat::cuda
