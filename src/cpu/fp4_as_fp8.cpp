// E2M1 codes under powers of two -> E4M3 codes under one scale a row.
#include "minifloat/core/fp4_as_fp8.h"

#include <algorithm>
#include <vector>

#include "backend.h"
#include "parallel.h"

namespace minifloat::cpu {
namespace {

void write_rows_as_fp8(const Fp4AsFp8Cast& to, const Execution& execution) {
  const auto& [q, codes, row_scale] = to;
  const Spec& spec = q.spec;
  const std::int64_t padded = spec.padded_cols(q.cols), bytes = spec.code_cols(q.cols);
  const std::int64_t scale_cols = spec.scale_cols(q.cols), scale_rows = spec.scale_rows(q.rows);
  const auto* scales = static_cast<const std::uint8_t*>(q.scale);
  std::vector<float> tensor_scale(static_cast<std::size_t>(q.batch));  // (batch)
  cpu::tensor_factor(q, tensor_scale.data(), execution);

  parallel_for(execution, q.batch * q.rows, q.batch * q.rows * padded, [&](std::int64_t row) {
    // 1. The blocks' exponents, and the largest of them.
    const std::int64_t batch = row / q.rows;
    const std::int64_t block_row = batch * scale_rows + row % q.rows / spec.block_rows;
    std::vector<int> exponent(static_cast<std::size_t>(scale_cols));
    int largest = kFp4AsFp8Zero;
    for (std::int64_t b = 0; b < scale_cols; ++b) {
      const std::uint32_t scale = scales[block_row * scale_cols + b];
      exponent[b] =
          spec.rule == ScaleRule::kMx ? fp4_exponent_e8m0(scale) : fp4_exponent_e4m3(scale);
      largest = std::max(largest, exponent[b]);
    }

    // 2. The row's factor, and the codes of its elements under that factor.
    const int row_exponent = fp4_row_exponent(largest);
    row_scale[row] = fp4_as_fp8_row_scale(row_exponent, tensor_scale[batch]);
    for (std::int64_t c = 0; c < padded; ++c) {
      const std::uint32_t pair = q.codes[row * bytes + c / 2];
      const std::uint32_t code = c % 2 == 0 ? pair & 0xF : pair >> 4;
      codes[row * padded + c] = static_cast<std::uint8_t>(
          fp4_as_fp8_code(code, exponent[c / spec.block_cols], row_exponent));
    }
  });
}

}  // namespace

void fp4_as_fp8(std::span<const Fp4AsFp8Cast> operands, const Execution& execution) {
  for (const Fp4AsFp8Cast& operand : operands) write_rows_as_fp8(operand, execution);
}

}  // namespace minifloat::cpu
