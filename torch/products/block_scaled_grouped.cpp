// The engine for operands with groups under block scales, on Blackwell: ATen's grouped block-scaled
// product. The op block_scaled_grouped_operands returns its arguments. Not yet run on hardware.
//
//     along rows             codes (M, k) · (E, n, k)ᵀ    a's scales of a group begin at the row
//                                                         Σ round_up(m_f, 128) of the groups before
//     along the contraction  codes (m, L) · (n, L)ᵀ       scales of a group begin at the column
//                                                         Σ round_up(blocks_f, 4)
//
// In torch 2.11 the kernels are MSLK's. They compute those places from the ends, and read MXFP8
// codes as E4M3 whatever their dtype. Of NVFP4 they read one product of both factors a group.
#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "ops/bridge.h"
#include "ops/op.h"
#include "products/block_scaled.h"
#include "products/fp8.h"
#include "products/grouped.h"
#include "products/products.h"
#include "products/tensor_factor.h"

namespace minifloat {
namespace torch_ops {
namespace block_scaled_grouped {

using c10::SymInt;

// Columns of codes as read come in whole 16 bytes of E2M1, and whole blocks.
constexpr std::int64_t kColumnUnit = 32;

bool supports(const Product& product, int capability) {
  if (capability != kBlackwell && capability != kBlackwellUltra) return false;
  const Spec &a = product.a, &b = product.b;
  if (a.rule != b.rule || a.elements != b.elements) return false;
  if (a.elements == Elements::kE2m1) return a.rule == ScaleRule::kMx || a.rule == ScaleRule::kNvfp4;
  return a.elements == Elements::kE4m3 && a.rule == ScaleRule::kMx;
}

// Whether the bytes of the scales of a are an int32, as the kernel has them along the contraction.
bool has_few_scales(const Spec& a, const ProductShape& shape) {
  if (shape.along != GroupsAlong::kContraction) return true;
  // A group takes a unit of columns at least.
  const std::int64_t groups = std::min<std::int64_t>(shape.k / kColumnUnit, kMostGroups);
  const std::int64_t cols = shape.k / a.block_cols + 4 * groups;
  return cols <= std::numeric_limits<std::int32_t>::max() / round_up<std::int64_t>(shape.m, 128);
}

bool takes(const Product& product, int, const ProductShape& shape) {
  return takes_codes(shape) && shape.k % kColumnUnit == 0 && !shape.has_fp4_as_fp8 &&
         shape.out_dtype == c10::ScalarType::BFloat16 && has_few_scales(product.a, shape);
}

// The arguments of at::_scaled_grouped_mm_v2.
struct Arguments {
  BlockScaledSide a, b;
  Tensor ends;  // int32 (groups): among the rows of a, or among columns as read
};

// Returns the tensor scales of an operand, fp32 (groups); undefined: it has none.
Tensor factor_of(const Spec& spec, const Codes& in) {
  if (!spec.has_tensor_amax()) return Tensor();
  if (in.amax.is_meta()) return at::empty_symint({in.amax.sym_numel()}, in.amax.options());
  return tensor_factor_of(spec, in.scale, in.amax).reshape({-1});
}

// cols: of the operand, without a transform's padding.   groups: of its rows or columns
BlockScaledSide side_of(const Spec& spec, const Codes& in, const SymInt& cols,
                        const Groups& groups) {
  c10::SymDimVector shape(in.codes.sym_sizes().begin(), in.codes.sym_sizes().end());
  shape[shape.size() - 2] = spec.scale_rows(shape[shape.size() - 2]);
  shape.back() = spec.scale_cols(cols);
  return block_scaled_side(spec, in.codes, in.scale.reshape_symint(shape), factor_of(spec, in),
                           groups);
}

Arguments arguments_of(const Product& product, const Codes& a, const Codes& b, const SymInt& cols,
                       const Groups& groups) {
  const bool is_along_rows = groups.unit == 0;
  return {side_of(product.a, a, cols, groups),
          side_of(product.b, b, cols, is_along_rows ? Groups{} : groups),
          ends_of(groups, groups.unit)};
}

Tensor multiply(const ProductCall& call) {
  const Codes &left = std::get<Codes>(call.a), &right = std::get<Codes>(call.b);
  const bool is_along_rows = call.groups.unit == 0;
  const auto [a, b, ends] = arguments_of(call.product, left, right, call.k, call.groups);
  const Tensor out =
      at::_scaled_grouped_mm_v2(a.codes, b.codes.transpose(-2, -1), a.scale, a.scaling, a.swizzle,
                                b.scale, b.scaling, b.swizzle, ends, std::nullopt, at::kBFloat16);
  return is_along_rows ? add_group_bias(out, call.groups, call.result) : out;
}

}  // namespace block_scaled_grouped

constinit const Engine kBlockScaledGrouped = {.name = "block_scaled_grouped",
                                              .does = "a grouped GEMM of codes under block scales",
                                              .is_grouped = true,
                                              .supports = block_scaled_grouped::supports,
                                              .takes = block_scaled_grouped::takes,
                                              .multiply = block_scaled_grouped::multiply};

namespace block_scaled_grouped {

constexpr const char* kGroupedOperands = "block_scaled_grouped_operands";

using Ints = std::vector<std::int64_t>;
using Results = std::tuple<Tensor, Tensor, std::vector<Tensor>, Ints, Ints, std::vector<Tensor>,
                           Ints, Ints, Tensor>;

Results operands_kernel(const Tensor& a, const Tensor& a_scale, const Tensor& a_amax,
                        const Tensor& b, const Tensor& b_scale, const Tensor& b_amax,
                        const std::string& text, SymInt k, const Tensor& table, std::int64_t unit) {
  const Product& product = bridge::parse_product(text);
  TORCH_CHECK_VALUE(supports(product, kBlackwell), kGroupedOperands,
                    ": expected both operands under MXFP8 in E4M3, MXFP4 or NVFP4, got ", text);
  const Codes left = {a, a_scale, a_amax}, right = {b, b_scale, b_amax};
  const Groups groups = {table, unit};
  TORCH_CHECK_VALUE(groups.unit % kColumnUnit == 0, "block-scaled products of groups: expected ",
                    "group_unit 0, 32, 64 or 128, got ", groups.unit);
  check_operands(kGroupedOperands, product, left, right, k, groups);
  for (const Tensor* t : {&a_scale, &a_amax, &b, &b_scale, &b_amax})
    bridge::check_same_device(kGroupedOperands, "an operand", *t, a);
  for (const Tensor* t : {&a, &a_scale, &a_amax, &b, &b_scale, &b_amax, &table})
    if (!a.is_meta()) bridge::check_memory(kGroupedOperands, "an operand", *t);
  const at::AutoDispatchBelowADInplaceOrView below;
  Arguments made = arguments_of(product, left, right, length_of(k, groups), groups);
  const auto copy = [](const Tensor& t) { return t.clone(at::MemoryFormat::Contiguous); };
  return {copy(made.a.codes),
          copy(made.b.codes).transpose(-2, -1),
          std::move(made.a.scale),
          std::move(made.a.scaling),
          std::move(made.a.swizzle),
          std::move(made.b.scale),
          std::move(made.b.scaling),
          std::move(made.b.swizzle),
          copy(made.ends)};
}

const Op operands_op(kGroupedOperands, operands_kernel, skipped());

}  // namespace block_scaled_grouped
}  // namespace torch_ops
}  // namespace minifloat
