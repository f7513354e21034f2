// The engine for FP8 codes with groups, under one scale a row or a group, on Hopper: kernels of
// this library (minifloat/grouped_product.h). FP4 codes under power-of-two scales are converted to
// E4M3 codes first. The result is rounded to bf16 once; a bias is added after that.
#include <ATen/ATen.h>

#include "minifloat/grouped_product.h"
#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/ops.h"
#include "products/fp8.h"
#include "products/grouped.h"

namespace minifloat::torch_ops {
namespace {

bool is_fp4(const Product& product) {
  return product.a.rule == product.b.rule && product.a.is_fp4_by_powers_of_two() &&
         product.b.is_fp4_by_powers_of_two();
}

bool supports(const Product& product, int capability) {
  const auto &a = product.a, &b = product.b;
  const bool has_scales =
      a.rule == b.rule && (a.rule == ScaleRule::kRow || a.rule == ScaleRule::kTensor);
  return capability == kHopper && has_grouped_fp8() &&
         ((a.is_fp8() && b.elements == Elements::kE4m3 && has_scales) || is_fp4(product));
}

bool takes(const Product&, int, const ProductShape& shape) {
  return takes_codes(shape) && shape.out_dtype == c10::ScalarType::BFloat16;
}

// FP8 codes and their scales, one a row or one a group.
struct Side {
  Elements elements;
  Tensor codes, scale;
  bool has_row_scales;

  GroupedFp8Operand operand() const {
    return {elements, static_cast<const std::uint8_t*>(codes.const_data_ptr()),
            scale.const_data_ptr<float>(), has_row_scales};
  }
};

// groups: of the operand's rows or columns; none where it is one matrix a group
Side side_of(const Spec& spec, const ProductInput& input, std::int64_t k, const Groups& groups) {
  if (!spec.is_fp4_by_powers_of_two()) {
    const Fp8Side fp8 = fp8_side(spec, input);
    return {spec.elements, fp8.codes, fp8.scale.contiguous(), spec.rule == ScaleRule::kRow};
  }
  if (const auto* fp8 = std::get_if<Fp4AsFp8>(&input))
    return {Elements::kE4m3, fp8->codes, fp8->row_scale, true};
  const Codes& in = std::get<Codes>(input);
  const auto [codes, scale] = fp4_as_fp8(in.codes, in.scale, in.amax, spec, k, groups);
  return {Elements::kE4m3, codes, scale, true};
}

Tensor multiply(const ProductCall& call) {
  const bool is_along_rows = call.groups.unit == 0;
  const Groups of_b = is_along_rows ? Groups{} : call.groups;
  const Side a = side_of(call.product.a, call.a, call.k, call.groups),
             b = side_of(call.product.b, call.b, call.k, of_b);
  const std::int64_t m = a.codes.size(0), n = b.codes.size(-2);
  const std::int64_t sizes[] = {call.groups.table->size(1) - 1, m, n};
  const Tensor out =
      direct_empty(a.codes, is_along_rows ? at::IntArrayRef(sizes + 1, 2) : at::IntArrayRef(sizes),
                   at::kBFloat16);
  bridge::with_value_errors([&] {
    const GroupedFp8Product product = {
        .a = a.operand(),
        .b = b.operand(),
        .groups = group_table_of("scaled_mm", call.groups, call.groups.unit),
        .m = m,
        .n = n,
        .k = a.codes.size(1),
        .fast = call.product.fast && !is_fp4(call.product),
        .out = static_cast<std::uint16_t*>(out.mutable_data_ptr())};
    grouped_fp8_product(product, bridge::ExecutionOn(out));
  });
  return is_along_rows ? add_group_bias(out, call.groups, call.result) : out;
}

}  // namespace

constinit const Engine kCutlassGrouped = {.name = "cutlass_grouped",
                                          .is_grouped = true,
                                          .supports = supports,
                                          .takes = takes,
                                          .reads_values = false,
                                          .prepare = nullptr,
                                          .multiply = multiply};

}  // namespace minifloat::torch_ops
