// The operands of a product, each in one of five forms. Each form is a type, so that no engine
// infers the form from a dtype.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <variant>

#include "minifloat/spec.h"

namespace minifloat::torch_ops {

using at::Tensor;

// The operand itself, where its spec is bf16.
struct Values {
  Tensor values;  // fp32 or bf16 (rows, cols)
};

// The output of a cast.
struct Codes {
  Tensor codes;  // uint8 (rows, code_cols)
  Tensor scale;  // fp32, or the bytes of E8M0 or E4M3
  Tensor amax;   // fp32; undefined where the spec has none
};

// The output of a cast that wrote swizzled scales (core/swizzle.h), of one matrix.
struct SwizzledCodes {
  Tensor codes;  // as in Codes
  Tensor scale;  // one byte for each block of each row: (tiles down, tiles across, 512)
  Tensor amax;   // as in Codes
};

// Codes times block scales, as the exact product reads them.
struct Decoded {
  Tensor values;  // bf16, or fp32 under Spec::has_fp32_values, (rows, padded_cols)
  // As in Codes. Tensor scales and exact row scales are pending factors of the product.
  Tensor scale, amax;
};

// FP4 codes under power-of-two scales as FP8 codes of the same values (core/fp4_as_fp8.h).
struct Fp4AsFp8 {
  Tensor codes;      // float8_e4m3fn (rows, padded_cols)
  Tensor row_scale;  // fp32 (rows)
  Tensor amax;       // as in Codes; row_scale includes its factor
};

using ProductInput = std::variant<Values, Codes, SwizzledCodes, Decoded, Fp4AsFp8>;

// The tensors of an operand in the schema of scaled_mm, in the schema's order. Null: the form has
// no such tensor.
struct InputTensors {
  const Tensor *elements, *scale, *amax;
};
InputTensors tensors_of(const ProductInput& input);

// Returns the output of a cast as an input: Values where the spec is bf16, else codes, whose
// swizzled scales have a dimension more.
inline ProductInput cast_input(const Spec& spec, const Tensor& codes, const Tensor& scale,
                               const Tensor& amax) {
  if (spec.is_bf16()) return Values{codes};
  if (codes.defined() && scale.defined() && scale.dim() == codes.dim() + 1)
    return SwizzledCodes{codes, scale, amax};
  return Codes{codes, scale, amax};
}

// Returns swizzled scales row-major, as other casts write them.   cols: of the operand
Codes as_codes(const Spec& spec, const SwizzledCodes& in, const c10::SymInt& cols);

// Returns the operand of three tensors of an op. The schemas of scaled_mm and linear name no form,
// so this function alone tells the forms apart, by dtype and dimensions. check_input raises for a
// dtype of no form.
ProductInput input_of(const Spec& spec, const Tensor& elements, const Tensor& scale,
                      const Tensor& amax);

// The sizes that check_input expects of an operand.
struct InputSizes {
  c10::SymInt k, values_k;              // the columns of codes, and of an operand under bf16
  std::optional<c10::SymInt> matrices;  // a matrix a group; none: one matrix
  std::optional<c10::SymInt> groups;    // of the rows, or of the columns
  bool is_along_contraction = false;    // the groups are of the columns
};

// Requires the shapes and dtypes of an operand. name: of the operand, for errors of scaled_mm.
void check_input(const char* name, const Spec& spec, const ProductInput& input,
                 const InputSizes& sizes);

// Whether scales of rows are a pending factor of decoded values: stored, or those of amaxes.
inline bool has_row_factors(const Spec& spec) {
  return spec.has_row_amax() &&
         (spec.has_blocks() || is_scaled_after_product(spec.rule, spec.scale_rounding));
}

}  // namespace minifloat::torch_ops
