#include "products/grouped.h"

#include <ATen/ATen.h>

#include "ops/bridge.h"
#include "ops/direct.h"
#include "products/fp8.h"

namespace minifloat::torch_ops {

void warn_without_kernels(int capability) {
  if (capability != kHopper || has_grouped_products()) return;
  TORCH_WARN_ONCE(
      "minifloat: this build has no kernels for products of experts on Hopper (it had no CUTLASS "
      "headers), so torch multiplies. FP8 takes up to 1.3 times as long, up to 2.7 times with 128 "
      "experts, and E5M2 and 128-blocks are multiplied in bf16. To build the kernels, run `pip "
      "install .` again with nvcc on the path");
}

bool takes_grouped_codes(const Product&, int, const ProductShape& shape) {
  return takes_codes(shape) && shape.out_dtype == c10::ScalarType::BFloat16;
}

Tensor ends_of(const Groups& groups, std::int64_t unit) {
  return groups.table->select(0, group_table_row(static_cast<int>(unit))).slice(0, 1);
}

Tensor group_of_rows(const Groups& groups, std::int64_t rows) {
  const Tensor ends = ends_of(groups, 0);
  const Tensor row = at::arange(rows, ends.options());
  return at::searchsorted(ends, row, /*out_int32=*/false, /*right=*/true)
      .clamp_max(ends.size(0) - 1);
}

Tensor add_group_bias(const Tensor& sums, const Groups& groups, const Result& result) {
  if (!result.bias) return to_dtype(sums, result.dtype);
  const Tensor bias = to_dtype(*result.bias, result.dtype);
  const Tensor of_rows = bias.index_select(0, group_of_rows(groups, sums.size(0)));
  return to_dtype(sums.add(of_rows), result.dtype);
}

GroupScales scales_of_codes(const Spec& spec) {
  if (spec.is_fp4_by_powers_of_two() || spec.rule == ScaleRule::kRow) return GroupScales::kRows;
  if (spec.rule != ScaleRule::kBlock) return GroupScales::kGroups;
  return spec.block_rows == 1 ? GroupScales::k1x128 : GroupScales::k128x128;
}

GroupedSide fp8_codes(const ProductCall& call, bool is_b) {
  const Spec& spec = is_b ? call.product.b : call.product.a;
  const ProductInput& input = is_b ? call.b : call.a;
  const GroupScales scales = scales_of_codes(spec);
  if (spec.is_fp4_by_powers_of_two()) {
    const bool is_matrices = is_b && call.groups.unit == 0;  // one a group
    const Fp4AsFp8 fp8 = as_fp8(spec, input, call.k, is_matrices ? Groups{} : call.groups);
    return {Elements::kE4m3, fp8.codes, fp8.row_scale, scales};
  }
  const Fp8Side fp8 = fp8_side(spec, input);
  return {spec.elements, fp8_view(fp8), fp8.scale, scales};
}

Tensor product_by_kernel(const ProductCall& call, const GroupedSide& a, const GroupedSide& b,
                         bool fast) {
  const auto operand = [](const GroupedSide& side) {
    return GroupedOperand{side.elements, side.values.const_data_ptr(),
                          side.scale.defined() ? side.scale.const_data_ptr<float>() : nullptr,
                          side.scales};
  };
  const bool is_along_rows = call.groups.unit == 0;
  const std::int64_t m = a.values.size(0), n = b.values.size(-2);
  const std::int64_t sizes[] = {call.groups.table->size(1) - 1, m, n};
  const Tensor out =
      direct_empty(a.values, is_along_rows ? at::IntArrayRef(sizes + 1, 2) : at::IntArrayRef(sizes),
                   at::kBFloat16);
  const Tensor bias =
      call.result.bias ? to_dtype(*call.result.bias, at::kBFloat16).contiguous() : Tensor();
  bridge::with_value_errors([&] {
    const GroupedProduct product = {
        .a = operand(a),
        .b = operand(b),
        .groups = group_table_of("scaled_mm", call.groups, call.groups.unit),
        .m = m,
        .n = n,
        .k = a.values.size(1),
        .fast = fast,
        .bias = bias.defined() ? static_cast<const std::uint16_t*>(bias.const_data_ptr()) : nullptr,
        .out = static_cast<std::uint16_t*>(out.mutable_data_ptr())};
    grouped_product(product, bridge::ExecutionOn(out));
  });
  return out;
}

}  // namespace minifloat::torch_ops
