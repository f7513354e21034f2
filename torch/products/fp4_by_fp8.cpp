// The engine for FP4 codes under power-of-two scales. It converts them to E4M3 codes of the same
// values under one scale for each row (core/fp4_as_fp8.h), which an FP8 product multiplies. One
// kernel for each operand, then one for the product.
#include "ops/ops.h"
#include "products/fp8.h"

namespace minifloat::torch_ops {
namespace {

bool supports(const Product& product, int capability) {
  const auto &a = product.a, &b = product.b;
  return capability >= kHopper && a.rule == b.rule && a.is_fp4_by_powers_of_two() &&
         b.is_fp4_by_powers_of_two();
}

Fp4AsFp8 as_fp8(const Spec& spec, const Codes& in, const c10::SymInt& cols) {
  auto [codes, row_scale] = fp4_as_fp8(in.codes, in.scale, in.amax, spec, cols);
  return {std::move(codes), std::move(row_scale), in.amax};
}

ProductInput prepare(const Spec& spec, const Codes& codes, const c10::SymInt& cols) {
  return as_fp8(spec, codes, cols);
}

Tensor multiply(const ProductCall& call) {
  const auto prepared = [&](const Spec& spec, const ProductInput& input) {
    const Codes* const codes = std::get_if<Codes>(&input);
    return codes ? as_fp8(spec, *codes, call.k) : std::get<Fp4AsFp8>(input);
  };
  const Fp4AsFp8 a = prepared(call.product.a, call.a), b = prepared(call.product.b, call.b);
  return fp8_product({Elements::kE4m3, a.codes, a.row_scale},
                     {Elements::kE4m3, b.codes, b.row_scale}, true, call.product.fast, call.result);
}

}  // namespace

constinit const Engine kFp4ByFp8 = {.name = "fp4_by_fp8",
                                    .supports = supports,
                                    .takes = takes_rows,
                                    .reads_values = false,
                                    .prepare = prepare,
                                    .multiply = multiply};

}  // namespace minifloat::torch_ops
