// Shared parts of the engines that multiply FP8 codes.
#pragma once

#include "products/engines.h"

namespace minifloat::torch_ops {

// Whether cuBLAS multiplies codes of these specs: FP8 by FP8, except E5M2 by E5M2.
inline bool has_fp8_product(const Spec& a, const Spec& b) {
  return a.is_fp8() && b.is_fp8() &&
         (a.elements == Elements::kE4m3 || b.elements == Elements::kE4m3);
}

// The elements of an operand's codes in an FP8 product: FP4 converts to E4M3.
inline Elements fp8_elements(const Spec& spec) {
  return spec.is_fp4_by_powers_of_two() ? Elements::kE4m3 : spec.elements;
}

// Whether an operand is FP4 codes that convert to E4M3 codes of the same values under one scale a
// row, and the other is such codes too, or FP8 under one scale a row.
inline bool is_fp4_by_fp8(const Product& product) {
  const auto has_rows = [](const Spec& spec) {
    return spec.is_fp4_by_powers_of_two() || (spec.is_fp8() && spec.rule == ScaleRule::kRow);
  };
  const auto &a = product.a, &b = product.b;
  return has_rows(a) && has_rows(b) && (a.is_fp4_by_powers_of_two() || b.is_fp4_by_powers_of_two());
}

// Converts FP4 codes that are not converted. groups: of the operand's rows or columns
Fp4AsFp8 as_fp8(const Spec& spec, const ProductInput& input, const c10::SymInt& cols,
                const Groups& groups = {});

// Whether the codes are contiguous and aligned, no size is 0, and n and k are multiples of 16.
inline bool takes_codes(const ProductShape& shape) {
  return shape.has_codes && shape.m > 0 && shape.n > 0 && shape.k > 0 && shape.n % 16 == 0 &&
         shape.k % 16 == 0;
}

// Whether a GPU multiplies FP8 codes (torch 2.11, ScaledBlas.cpp:475).
inline bool reads_fp8(int capability) { return capability >= kAda; }

// Whether a product of codes under row scales accepts the sizes and the result. Off Hopper it is
// CUTLASS's, which writes only bf16 (torch 2.11, RowwiseScaledMM.cu:1101).
inline bool takes_rows(const Product&, int capability, const ProductShape& shape) {
  const bool writes = capability == kHopper || shape.out_dtype == c10::ScalarType::BFloat16;
  return takes_codes(shape) && writes;
}

// Whether torch's product of row scales is safe on the current stream of this device. On compute
// capability 8.9 torch 2.11 clears its workspace on the default stream, whichever is current: on
// another one sums are wrong, or it never ends (pytorch/pytorch#177651, mended in 2.12).
bool is_safe_for_rows(const at::Device& device);

// One operand of a product of FP8 codes.
struct Fp8Side {
  Elements elements;    // of the codes: kE4m3 or kE5m2
  const Tensor& codes;  // contiguous uint8 or float8 (rows, k)
  const Tensor& scale;  // fp32: one, or (rows)
};
inline Fp8Side fp8_side(const Spec& spec, const ProductInput& input) {
  const Codes& codes = std::get<Codes>(input);
  return {spec.elements, codes.codes, codes.scale};
}

// Returns the codes as float8_e4m3fn or float8_e5m2.
Tensor fp8_view(const Fp8Side& side);

// Returns the scale in another shape.
Tensor scale_view(const Fp8Side& side, at::IntArrayRef shape);

// Returns a · bᵀ of codes under one scale for a tensor, or one for each row, (m, n).
Tensor fp8_product(const Fp8Side& a, const Fp8Side& b, bool has_row_scales, bool fast,
                   const Result& result);

}  // namespace minifloat::torch_ops
