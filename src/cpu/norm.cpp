// Normalisations, a row at a time. These loops are the specification of the other backends.
#include "cpu/norm.h"

#include <cstddef>
#include <memory>
#include <vector>

#include "backend.h"
#include "norm_row.h"
#include "parallel.h"

namespace minifloat::cpu {
namespace {

// Returns a weight or a bias in fp32.   absent: its value where there is none
std::vector<float> in_fp32(const void* values, DType dtype, std::int64_t count, float absent) {
  std::vector<float> out(static_cast<std::size_t>(count), absent);
  for (std::int64_t i = 0; values && i < count; ++i)
    out[static_cast<std::size_t>(i)] =
        dtype == DType::kFloat32 ? static_cast<const float*>(values)[i]
                                 : decode_bf16(static_cast<const std::uint16_t*>(values)[i]);
  return out;
}

template <class T>
RowStatistics run_row(NormKind kind, const NormRow<T>& row) {
  switch (kind) {
    case NormKind::kRms: return run_widest<NormaliseRow<T, NormKind::kRms>>(row);
    case NormKind::kRmsRounded: return run_widest<NormaliseRow<T, NormKind::kRmsRounded>>(row);
    case NormKind::kLayer: break;
  }
  return run_widest<NormaliseRow<T, NormKind::kLayer>>(row);
}

// Runs all rows.   y: null for the statistics alone; factors, means: null, or (rows)
template <class T>
void run_rows(const Norm& of, void* y, float* factors, float* means, const Execution& execution) {
  const std::int64_t parameters = y ? of.cols : 0;
  const std::vector<float> weight = in_fp32(of.weight, of.weight_dtype, parameters, 1.0f),
                           bias = in_fp32(of.bias, of.bias_dtype, parameters, -0.0f);
  parallel_for(execution, of.rows, of.rows * of.cols, [&](std::int64_t r) {
    const NormRow<T> row = {.x = static_cast<const T*>(of.x) + r * of.row_stride,
                            .cols = of.cols,
                            .weight = weight.data(),
                            .bias = bias.data(),
                            .eps = of.eps,
                            .y = y ? static_cast<T*>(y) + r * of.cols : nullptr};
    const RowStatistics found = run_row(of.kind, row);
    if (factors) factors[r] = with_one_nan(found.factor);
    if (means) means[r] = with_one_nan(found.mean);
  });
}

void run(const Norm& of, void* y, float* factors, float* means, const Execution& execution) {
  of.dtype == DType::kFloat32 ? run_rows<float>(of, y, factors, means, execution)
                              : run_rows<std::uint16_t>(of, y, factors, means, execution);
}

}  // namespace

void norm(const Norm& of, void* y, const Execution& execution) {
  run(of, y, nullptr, nullptr, execution);
}

void norm_statistics(const Norm& of, float* factors, float* means, const Execution& execution) {
  run(of, nullptr, factors, means, execution);
}

void quantize_norm(const Norm& of, const Operand* rowwise, const Operand* columnwise,
                   const Execution& execution) {
  const std::int64_t size = of.dtype == DType::kFloat32 ? 4 : 2;
  const auto y = std::make_unique_for_overwrite<std::byte[]>(
      static_cast<std::size_t>(of.rows * of.cols * size));
  cpu::norm(of, y.get(), execution);
  cpu::quantize(of.y_at(y.get()), rowwise, columnwise, execution);
}

}  // namespace minifloat::cpu
