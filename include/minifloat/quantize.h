// amax, quantize and dequantize: pure functions of (values, spec, seed, position).
//
// "As read" means the matrix itself rowwise, its transpose columnwise: a columnwise operand of x (R, C)
// is read (C, R), and codes, scales and positions are those of that matrix. The buffers' shapes, for an
// operand read (rows, cols), with a leading batch:
//
//     codes     (rows, spec.code_cols(cols)) bytes
//     scale     fp32: () or (rows) or (block rows, block cols);  E8M0, E4M3: (block rows, block cols) bytes
//     amax      fp32: () for tensor scaling and NVFP4, (rows) for row scaling; of the values after the transform
//     decoded   bf16: (rows, spec.padded_cols(cols)), the values of the codes for an exact product
#pragma once

#include <cstdint>

#include "minifloat/spec.h"
#include "minifloat/tensor_ref.h"

namespace minifloat {

// Where stochastic rounding's bits come from. `state` lies in the tensors' device memory: (seed, count),
// and with state_size 3 (seed, count, module stream), which is xor-ed to `stream`. The key is
// mix_seed(seed, count).
struct Random {
  const std::int64_t* state = nullptr;
  int state_size = 0;
  std::uint64_t stream = 0;
};

// The logical position of the operand's first element within the whole that it is a shard of, as read.
// col is a multiple of 16 under stochastic rounding, and of the transform.
struct Origin {
  std::int64_t row = 0;
  std::int64_t col = 0;
};

// One direction of a quantization: the spec and the buffers, all of x's device.
struct Operand {
  Spec spec;
  const float* given_amax = nullptr;  // shaped as amax; null: computed from the values
  Random random;                      // required by +sr
  Origin origin;
  std::uint8_t* codes = nullptr;
  void* scale = nullptr;
  // null: not wanted. The amax in force, given or computed; under +delayed the values' own, for the history.
  float* amax = nullptr;
  std::uint16_t* decoded = nullptr;  // null: not wanted
};

// max |x| as the spec needs it, rowwise or columnwise. out: shaped as amax above.
void amax(const TensorRef& x, const Spec& spec, bool columnwise, float* out,
          const Execution& execution = {});

// Both directions from one read where both are given; null: that direction is not wanted.
// Throws Error where a spec cannot take the input; nothing is written then.
void quantize(const TensorRef& x, const Operand* rowwise, const Operand* columnwise,
              const Execution& execution = {});

// A quantized operand, read (rows, cols) a matrix.
struct Quantized {
  Spec spec;
  const std::uint8_t* codes = nullptr;
  const void* scale = nullptr;
  const float* amax = nullptr;  // NVFP4 needs it: the amax that the scales were made with
  std::int64_t batch = 1;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  Device device = Device::kCpu;
};

// The operand's values: fl32(code * scale), and for NVFP4 fl32(fl32(code * scale) * fl32(1 / S)).
// out: (batch, rows, padded_cols), in fp32 or rounded to bf16. Transformed operands stay transformed.
void dequantize(const Quantized& operand, DType dtype, void* out, const Execution& execution = {});

// What an exact product multiplies, in bf16: code * scale where the scale is a power of two or NVFP4's
// block scale, the code alone where it is any fp32 (tensor scaling, +exact): what is left is
// `tensor_factor` or the row scale. Exact for 2^-126 <= |v| <= bf16's max; below: zero; above: saturated.
void decode_for_product(const Quantized& operand, std::uint16_t* out,
                        const Execution& execution = {});

// The fp32 factor that an exact product of this operand is still to be multiplied by: the tensor scale.
// out: (batch)
void tensor_factor(const Quantized& operand, float* out, const Execution& execution = {});

// An E2M1 operand whose block scales are powers of two (mxfp4; nvfp4+pow2), as E4M3 codes under one fp32 scale a
// row, which an FP8 product multiplies (core/fp4_as_fp8.h). Exact where a block's scale is at least 2^-14 of the largest
// of its row; below, within 2^-16 of that largest scale.
//   codes: (batch, rows, padded_cols) bytes;  row_scale: (batch, rows), the tensor's scale included
void fp4_as_fp8(const Quantized& operand, std::uint8_t* codes, float* row_scale,
                const Execution& execution = {});

}  // namespace minifloat
