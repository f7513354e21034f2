#include "products/exact.h"

#include <ATen/ATen.h>

#include "ops/ops.h"

namespace minifloat::torch_ops {
namespace {

Decoded decoded_of(const Spec& spec, const Codes& in, const c10::SymInt& cols,
                   const Groups& groups = {}) {
  return {decode(in.codes, in.scale, spec, cols, groups), in.scale, in.amax};
}

ExactSide side_of(const Spec& spec, const Decoded& in) {
  ExactSide side = {.values = in.values, .factor = {}, .row_factors = {}};
  if (spec.has_tensor_amax()) side.factor = {&spec, in.scale, in.amax};
  if (has_row_factors(spec))
    side.row_factors = spec.has_blocks() ? tensor_factor_of(spec, in.scale, in.amax) : in.scale;
  return side;
}

}  // namespace

ExactSide exact_side(const Spec& spec, const ProductInput& input, std::int64_t k,
                     const Groups& groups) {
  struct Visitor {
    const Spec& spec;
    std::int64_t k;
    const Groups& groups;
    ExactSide operator()(const Values& in) const { return {in.values, {}, {}}; }
    ExactSide operator()(const Codes& in) const {
      return side_of(spec, decoded_of(spec, in, k, groups));
    }
    ExactSide operator()(const SwizzledCodes& in) const { return (*this)(as_codes(spec, in, k)); }
    ExactSide operator()(const Decoded& in) const { return side_of(spec, in); }
    ExactSide operator()(const Fp4AsFp8& in) const {
      return {in.codes.to(at::kBFloat16), {}, in.row_scale};
    }
  };
  return std::visit(Visitor{spec, k, groups}, input);
}

Tensor factor_of_both(const ExactSide& a, const ExactSide& b) {
  if (a.factor && b.factor) return tensor_factor_of(*a.factor) * tensor_factor_of(*b.factor);
  if (!a.factor && !b.factor) return Tensor();
  return tensor_factor_of(a.factor ? *a.factor : *b.factor);
}

ProductInput prepare_exact(const Spec& spec, const Codes& codes, const c10::SymInt& cols) {
  return decoded_of(spec, codes, cols);
}

bool takes_all(const Product&, int, const ProductShape&) { return true; }

}  // namespace minifloat::torch_ops
