// The exact product of operands with groups, on the CPU: an exact product for each group.
#include <ATen/ATen.h>

#include "ops/direct.h"
#include "products/exact.h"

namespace minifloat::torch_ops {
namespace exact_grouped_cpu {

bool supports(const Product&, int capability) { return capability == kNoGpu; }

// A run of rows or columns.
struct Range {
  std::int64_t begin, end;
};
Range range_of(const std::int32_t* boundaries, int e) { return {boundaries[e], boundaries[e + 1]}; }

// The pending factor of matrix or group e. Undefined tensors have one element at most.
std::optional<TensorFactor> factor_at(const std::optional<TensorFactor>& factor, std::int64_t e) {
  if (!factor) return factor;
  const auto at = [&](const Tensor& t) {
    return t.defined() && t.numel() > 1 ? t.reshape(-1).select(0, e) : t;
  };
  const bool is_scale = factor->spec->rule == ScaleRule::kTensor;
  return TensorFactor{factor->spec, is_scale ? at(factor->scale) : factor->scale, at(factor->amax)};
}

// Returns group e's rows of an operand.
ExactSide rows_of(const ExactSide& side, const Range& rows, std::int64_t e) {
  return {side.values.slice(0, rows.begin, rows.end), factor_at(side.factor, e),
          side.row_factors.defined() ? side.row_factors.slice(0, rows.begin, rows.end) : Tensor()};
}

// Returns matrix e.
ExactSide matrix_of(const ExactSide& side, std::int64_t e) {
  return {side.values.select(0, e), factor_at(side.factor, e),
          side.row_factors.defined() ? side.row_factors.select(0, e) : Tensor()};
}

// Returns group e's columns of an operand: of the values themselves, or of padded ones.
ExactSide columns_of(const ExactSide& side, bool is_padded, const GroupTable& groups, int e) {
  const Range rows = range_of(groups.of_rows(), e);
  const std::int64_t begin = is_padded ? groups.under(groups.unit)[e] : rows.begin;
  const std::int64_t end = is_padded ? groups.under(groups.unit)[e + 1] : rows.end;
  return {side.values.slice(1, begin, end), factor_at(side.factor, e),
          side.row_factors.defined() ? side.row_factors.select(0, e) : Tensor()};
}

// (M, k) · (E, n, k)ᵀ, (M, n): rows past the last group are not written.
Tensor multiply_rows(const ProductCall& call, const GroupTable& groups) {
  const ExactSide a = exact_side(call.product.a, call.a, call.k, call.groups),
                  b = exact_side(call.product.b, call.b, call.k);
  Tensor out =
      at::empty({a.values.size(0), b.values.size(1)}, a.values.options().dtype(call.result.dtype));
  for (int e = 0; e < groups.count; ++e) {
    const Range rows = range_of(groups.of_rows(), e);
    if (rows.begin == rows.end) continue;
    const auto bias =
        call.result.bias ? std::optional(call.result.bias->select(0, e)) : std::nullopt;
    out.slice(0, rows.begin, rows.end)
        .copy_(
            exact_product_on_cpu(rows_of(a, rows, e), matrix_of(b, e), {bias, call.result.dtype}));
  }
  return out;
}

// (m, K) · (n, K)ᵀ of the columns of each group, (E, m, n). Where one operand is the values
// themselves, columns past a group's rows are left out: they are zeros of the other.
Tensor multiply_columns(const ProductCall& call, const GroupTable& groups) {
  const ExactSide a = exact_side(call.product.a, call.a, call.k, call.groups),
                  b = exact_side(call.product.b, call.b, call.k, call.groups);
  const bool a_padded = !call.product.a.is_bf16(), b_padded = !call.product.b.is_bf16();
  Tensor out = at::empty({groups.count, a.values.size(0), b.values.size(0)},
                         a.values.options().dtype(call.result.dtype));
  for (int e = 0; e < groups.count; ++e) {
    ExactSide left = columns_of(a, a_padded, groups, e), right = columns_of(b, b_padded, groups, e);
    const std::int64_t length = std::min(left.values.size(1), right.values.size(1));
    left.values = left.values.slice(1, 0, length), right.values = right.values.slice(1, 0, length);
    out.select(0, e).copy_(exact_product_on_cpu(left, right, call.result));
  }
  return out;
}

Tensor multiply(const ProductCall& call) {
  const GroupTable groups = group_table_of("scaled_mm", call.groups, call.groups.unit);
  return call.groups.unit > 0 ? multiply_columns(call, groups) : multiply_rows(call, groups);
}

}  // namespace exact_grouped_cpu

constinit const Engine kExactGroupedCpu = {
    .name = "exact_grouped",
    .does = "a bf16 GEMM of the decoded values for each group",
    .is_grouped = true,
    .supports = exact_grouped_cpu::supports,
    .takes = takes_all,
    .reads_values = true,
    .multiply = exact_grouped_cpu::multiply};

}  // namespace minifloat::torch_ops
