// The exact product of operands with groups on CUDA: ATen's grouped bf16 product. It writes bf16
// alone, so pending factors and a bias round a second time (docs/numerics.md, section 10). Operands
// of which one is fp32 are multiplied in fp32, group by group: the host waits for the groups' ends.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "minifloat/core/block.h"
#include "ops/direct.h"
#include "products/exact.h"
#include "products/grouped.h"

namespace minifloat::torch_ops {
namespace exact_grouped_cuda {

bool supports(const Product&, int capability) { return capability != kNoGpu; }

// Torch's grouped products read rows or columns that start at multiples of 16 bytes.
constexpr std::int64_t kAlignment = 8;  // elements: 16 bytes of bf16, 32 of fp32

bool has_aligned_runs(const Tensor& values) {
  const std::int64_t adjacent = values.stride(-1) == 1 ? -1 : -2,
                     pitch = values.stride(-3 - adjacent);
  return values.stride(adjacent) == 1 && pitch % kAlignment == 0 &&
         pitch >= values.size(adjacent) &&
         (values.dim() == 2 || values.stride(0) % kAlignment == 0) &&
         reinterpret_cast<std::uintptr_t>(values.const_data_ptr()) % 16 == 0;
}

// Returns values (…, rows, k) as torch's grouped products read them, with zeros up to a multiple of
// kAlignment along `dim`, the last or the one before: themselves, or a copy with adjacent elements
// along `dim`.
Tensor aligned(const Tensor& values, std::int64_t dim) {
  const std::int64_t size = values.size(dim),
                     padded = round_up(std::max<std::int64_t>(size, 1), kAlignment);
  if (padded == size && has_aligned_runs(values)) return values;
  const Tensor from = values.transpose(dim, -1);
  std::vector<std::int64_t> shape = from.sizes().vec();
  shape.back() = padded;
  const Tensor to = at::zeros(shape, from.options());
  to.narrow(-1, 0, size).copy_(from);
  return to.transpose(dim, -1);
}

// Returns an unquantized operand (C, M) in the padded columns of groups, (C, L), zeros past the
// rows of each.
Tensor padded_columns(const Tensor& values, const ProductCall& call) {
  const Groups& groups = call.groups;
  if (values.size(1) == 0)
    return at::zeros({call.k, values.size(0)}, values.options()).t();  // no row to pick
  const Tensor table = groups.table->to(at::kLong);
  const Tensor starts = table.select(0, group_table_row(static_cast<int>(groups.unit)));
  const Tensor rows = table.select(0, 0);
  const std::int64_t count = starts.size(0) - 1;
  const Tensor column = at::arange(call.k, starts.options());
  const Tensor group = at::searchsorted(starts.slice(0, 1).contiguous(), column, false, true)
                           .clamp_max(std::max<std::int64_t>(count - 1, 0));
  const Tensor row = rows.index_select(0, group) + column - starts.index_select(0, group);
  const Tensor is_inside = row.lt(rows.slice(0, 1).index_select(0, group));
  const Tensor picked = values.t().index_select(0, row.clamp(0, values.size(1) - 1));  // (L, C)
  return at::where(is_inside.unsqueeze(1), picked, at::zeros({}, picked.options())).t();
}

// Returns the sums, in bf16, or in fp32 where an operand is.
Tensor sums_of(const Tensor& a, const Tensor& b, const Tensor& ends) {
  const at::ScalarType dtype = are_bf16(a, b) ? at::kBFloat16 : at::kFloat;
  return at::_grouped_mm(to_dtype(a, dtype), to_dtype(b, dtype).transpose(-2, -1), ends);
}

// Multiplies sums by a factor, in place: computed in fp32 and rounded once more.
void scale(Tensor& sums, const Tensor& factor) { at::mul_out(sums, sums, factor); }

Tensor multiply_rows(const ProductCall& call) {
  const ExactSide a = exact_side(call.product.a, call.a, call.k, call.groups),
                  b = exact_side(call.product.b, call.b, call.k);
  // Both grow to the same k.
  Tensor out = sums_of(aligned(a.values, -1), aligned(b.values, -1), ends_of(call.groups, 0));
  const Tensor factor = factor_of_both(a, b);
  Tensor of_rows = a.row_factors;  // (M), with the factor of each row's group
  if (factor.defined() || b.row_factors.defined()) {
    const Tensor group = group_of_rows(call.groups, out.size(0));
    if (factor.defined()) {
      const Tensor of_groups = factor.reshape(-1).expand(call.groups.table->size(1) - 1);
      const Tensor of_group = of_groups.index_select(0, group);
      of_rows = of_rows.defined() ? of_rows * of_group : of_group;
    }
    if (b.row_factors.defined()) scale(out, b.row_factors.index_select(0, group));
  }
  if (of_rows.defined()) scale(out, of_rows.unsqueeze(1));
  return add_group_bias(out, call.groups, call.result);
}

Tensor multiply_columns(const ProductCall& call) {
  const ExactSide a = exact_side(call.product.a, call.a, call.k, call.groups),
                  b = exact_side(call.product.b, call.b, call.k, call.groups);
  const bool is_padded = !call.product.is_bf16();
  const auto columns = [&](const ExactSide& side, const Spec& spec) {
    // Groups of any length are multiplied where elements of a column are adjacent.
    if (!is_padded) return aligned(side.values.t().contiguous().t(), -2);
    return aligned(spec.is_bf16() ? padded_columns(side.values, call) : side.values, -1);
  };
  const Tensor left = columns(a, call.product.a), right = columns(b, call.product.b);
  Tensor out = sums_of(left, right, ends_of(call.groups, is_padded ? call.groups.unit : 0))
                   .narrow(1, 0, a.values.size(0))
                   .narrow(2, 0, b.values.size(0));
  const Tensor factor = factor_of_both(a, b);
  if (factor.defined()) scale(out, factor.reshape({-1, 1, 1}));
  if (a.row_factors.defined()) scale(out, a.row_factors.unsqueeze(2));
  if (b.row_factors.defined()) scale(out, b.row_factors.unsqueeze(1));
  return to_dtype(out, call.result.dtype);
}

Tensor multiply(const ProductCall& call) {
  return call.groups.unit > 0 ? multiply_columns(call) : multiply_rows(call);
}

}  // namespace exact_grouped_cuda

constinit const Engine kExactGroupedCuda = {.name = "exact_grouped",
                                            .does = "a grouped bf16 GEMM of the decoded values",
                                            .is_grouped = true,
                                            .supports = exact_grouped_cuda::supports,
                                            .takes = takes_all,
                                            .reads_values = true,
                                            .multiply = exact_grouped_cuda::multiply};

}  // namespace minifloat::torch_ops
