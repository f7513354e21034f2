#include "layers/operand_forms.h"

#include <optional>

namespace minifloat::torch_ops {
namespace {

// Returns the product that reads an operand.
PlannedProduct product_that_reads(const PreparedRecipe& recipe, Place place,
                                  const at::Device& device) {
  const Recipe& of = recipe.recipe;
  switch (place) {
    case kDgradG:
    case kDgradW: return plan_product(of.dgrad, recipe.dgrad, device);
    case kWgradG:
    case kWgradX: return plan_product(of.wgrad, recipe.wgrad, device);
    default: return plan_product(of.fprop, recipe.fprop, device);
  }
}

// Returns the shape of the product that reads an operand of x, where its sizes are no symbols, with
// one row of the result: an engine takes any number.
std::optional<ProductShape> product_shape(const Spec& spec, const Tensor& x, Place place,
                                          const std::array<SymInt, 2>& features,
                                          at::ScalarType dtype) {
  const auto& [n, k] = features;
  const bool is_fprop = place == kFpropX || place == kFpropW;
  const auto to_n = (is_fprop ? n : k).maybe_as_int(),
             to_k = x.sym_size(kOperands[place].columnwise ? 0 : 1).maybe_as_int();
  if (!to_n || !to_k) return std::nullopt;
  return ProductShape{.m = 1, .n = *to_n, .k = spec.padded_cols(*to_k), .out_dtype = dtype};
}

// Returns whether the engine that reads an operand of x reads a form, and accepts the sizes.
bool is_read_in(bool Engine::* form, at::ScalarType dtype, const PreparedRecipe& recipe,
                const Tensor& x, Place place, const CastContext& state) {
  const PlannedProduct product = product_that_reads(recipe, place, x.device());
  if (!(product.engine.*form)) return false;
  const auto shape = product_shape(recipe.specs[place], x, place, *state.features, dtype);
  return shape && product.engine.takes(product.product, product.capability, *shape);
}

// Returns whether this process has an operand whole, and products of one matrix read its codes.
bool is_of_one_matrix(const OperandUse& needed, const CastContext& state) {
  return needed.is_needed && !needed.decoded && state.features && !state.sharding &&
         !state.groups.table;
}

}  // namespace

bool writes_fp8(const PreparedRecipe& recipe, const Tensor& x, const OperandUse& needed,
                const CastContext& state) {
  const Spec& spec = recipe.specs[needed.place];
  const bool is_saved = needed.place == kDgradW || recipe.keeps_codes(needed.place) ||
                        (needed.place == kWgradX && !needed.recomputed);
  if (is_saved || !is_of_one_matrix(needed, state)) return false;
  if (spec.rule != ScaleRule::kNvfp4 || !spec.is_fp4_by_powers_of_two()) return false;
  return is_read_in(&Engine::reads_fp4_as_fp8, at::kFloat, recipe, x, needed.place, state);
}

bool writes_swizzled(const PreparedRecipe& recipe, const Tensor& x, const OperandUse& needed,
                     const CastContext& state) {
  const Place place = needed.place;
  const bool is_dequantized = recipe.keeps_codes(place) || recipe.specs[place].is_of_forward();
  if (is_dequantized || !is_of_one_matrix(needed, state)) return false;
  if (state.apart_col && kOperands[place].columnwise) return state.swizzled_apart;
  return is_read_in(&Engine::reads_swizzled, at::kBFloat16, recipe, x, place, state);
}

}  // namespace minifloat::torch_ops
