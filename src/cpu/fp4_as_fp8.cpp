// 4-bit codes under powers of two -> E4M3 codes under one scale a row.
#include "minifloat/core/fp4_as_fp8.h"

#include <algorithm>
#include <vector>

#include "backends.h"
#include "grouped.h"
#include "parallel.h"
#include "with_format.h"

namespace minifloat::cpu {
namespace {

// Blocks [first, end) of a row that share a row scale: those of a group along the contraction
// dimension, or all.
struct Run {
  std::int64_t row, part;  // part: the index of the tensor scale
  std::int64_t first, end;
  float* row_scale;
};

template <class F>
void write_run_as_fp8(const Fp4AsFp8Cast& to, const Run& run, const float* tensor_scale) {
  const Quantized& q = to.operand;
  const Spec& spec = q.spec;
  const std::int64_t padded = spec.padded_cols(q.cols), bytes = spec.code_cols(q.cols);
  const std::int64_t scale_cols = spec.scale_cols(q.cols), scale_rows = spec.scale_rows(q.rows);
  const auto* scales = static_cast<const std::uint8_t*>(q.scale);

  // 1. The blocks' exponents, and the largest of them.
  const std::int64_t block_row = run.row / q.rows * scale_rows + run.row % q.rows / spec.block_rows;
  std::vector<int> exponent(static_cast<std::size_t>(run.end - run.first));
  int largest = kFp4AsFp8Zero;
  for (std::int64_t b = run.first; b < run.end; ++b) {
    const std::uint32_t scale = scales[block_row * scale_cols + b];
    const int k = spec.rule == ScaleRule::kMx ? fp4_exponent_e8m0(scale) : fp4_exponent_e4m3(scale);
    exponent[b - run.first] = k;
    largest = std::max(largest, k);
  }

  // 2. The row's factor, and the codes of its elements under that factor.
  const int row_exponent = fp4_row_exponent<F>(largest);
  *run.row_scale = fp4_as_fp8_row_scale<F>(row_exponent, tensor_scale[run.part]);
  const std::int64_t end = std::min(run.end * spec.block_cols, padded);
  for (std::int64_t c = run.first * spec.block_cols; c < end; ++c) {
    const std::uint32_t pair = q.codes[run.row * bytes + c / 2];
    const std::uint32_t code = c % 2 == 0 ? pair & 0xF : pair >> 4;
    to.codes[run.row * padded + c] = static_cast<std::uint8_t>(
        fp4_as_fp8_code<F>(code, exponent[c / spec.block_cols - run.first], row_exponent));
  }
}

template <class F>
void write_rows_as_fp8(const Fp4AsFp8Cast& to, const Execution& execution) {
  const Quantized& q = to.operand;
  const std::int64_t block = q.spec.block_cols, scale_cols = q.spec.scale_cols(q.cols);
  std::vector<float> tensor_scale(static_cast<std::size_t>(q.parts()));
  cpu::tensor_factor(q, tensor_scale.data(), execution);
  const auto each_row = [&](std::int64_t rows, auto f) {
    parallel_for(execution, rows, rows * q.spec.padded_cols(q.cols), f);
  };
  if (!q.groups)
    return each_row(q.batch * q.rows, [&](std::int64_t row) {
      write_run_as_fp8<F>(to, {row, row / q.rows, 0, scale_cols, to.row_scale + row},
                          tensor_scale.data());
    });
  each_group(q.groups, [&](const Group& group) {
    if (q.groups.unit == 0)
      return each_row(group.end - group.begin, [&](std::int64_t i) {
        const std::int64_t row = group.begin + i;
        write_run_as_fp8<F>(to, {row, group.index, 0, scale_cols, to.row_scale + row},
                            tensor_scale.data());
      });
    each_row(q.rows, [&](std::int64_t row) {
      const std::int64_t first = group.first_col / block, end = first + group.cols / block;
      write_run_as_fp8<F>(to,
                          {row, group.index, first, end, to.row_scale + group.index * q.rows + row},
                          tensor_scale.data());
    });
  });
}

}  // namespace

void fp4_as_fp8(std::span<const Fp4AsFp8Cast> operands, const Execution& execution) {
  for (const Fp4AsFp8Cast& to : operands)
    with_format(to.operand.spec.elements, [&]<class F>(F) {
      if constexpr (F::kBits == 4) write_rows_as_fp8<F>(to, execution);
    });
}

}  // namespace minifloat::cpu
