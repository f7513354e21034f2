// The CPU backend: the signatures of minifloat/quantize.h, transform.h and partial_cast.h, on host
// memory.
#pragma once

#include "minifloat/partial_cast.h"
#include "minifloat/quantize.h"
#include "minifloat/transform.h"

namespace minifloat::cpu {

void amax(const TensorRef& x, const AmaxOf& of, float* out, const Execution& execution);
void quantize(const TensorRef& x, const Operand* rowwise, const Operand* columnwise,
              const Execution& execution);
void dequantize(const Quantized& operand, DType dtype, void* out, const Execution& execution);
void decode_for_product(const Quantized& operand, std::uint16_t* out, const Execution& execution);
void tensor_factor(const Quantized& operand, float* out, const Execution& execution);
void product_factor(const Quantized& a, const Quantized& b, float* out, const Execution& execution);
void fp4_as_fp8(std::span<const Fp4AsFp8Cast> operands, const Execution& execution);
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

}  // namespace minifloat::cpu
