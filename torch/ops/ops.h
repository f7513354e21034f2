// Typed calls of the library's ops through the dispatcher, so that tensor subclasses, fake tensors
// and functional tensors intercept each op. Ops that a layer calls skip the dispatcher where
// nothing can intercept them (direct.h) and call their kernels (kernels.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "minifloat/spec.h"
#include "ops/groups.h"

namespace minifloat::torch_ops {

using at::Tensor;

// The result of a quantization in one direction. Absent tensors are empty or undefined.
struct QuantizedOperand {
  // uint8 (…, rows, code_cols), as read; may be absent beside `decoded`. Of a bf16 spec the values
  // themselves, bf16 or fp32.
  Tensor codes;
  Tensor scale;    // fp32, or the bytes of E8M0 or E4M3
  Tensor amax;     // fp32
  Tensor decoded;  // bf16 (…, rows, padded_cols), if requested
};

// The rowwise and the columnwise operand.
using Directions = std::pair<QuantizedOperand, QuantizedOperand>;

// The amax history of +delayed operands, (operands, 1 + length), or of experts (operands, experts,
// 1 + length), and the row of each direction. Column 0 has the active amaxes, column 1 the current
// ones.
struct HistoryRows {
  Tensor history;
  std::int64_t row = 0, col = 0;
};

struct QuantizeOptions {
  std::optional<Tensor> amax_row, amax_col;
  std::optional<Tensor> rng;  // int64 (2) or (3): seed, count, module stream
  std::int64_t stream_row = 0, stream_col = 0;
  // Also writes the values for an exact product. Where no dispatcher is in between, codes that come
  // with their values are not written: one product reads the operand, and reads its values.
  bool decoded_row = false, decoded_col = false;
  // Writes FP4 as fp4_as_fp8 does: float8_e4m3fn codes (…, rows, padded_cols), and row scales.
  bool fp8_row = false, fp8_col = false;
  // Writes one-byte scales in core/swizzle.h's layout, zero padded: (…, tiles down, tiles across,
  // 512), those of 2D blocks once for each row.
  bool swizzled_row = false, swizzled_col = false;
  // Beside a rowwise direction alone, whose scale is a row's: also returns max |x| of each column,
  // as the amax of the absent columnwise direction.
  bool amaxes_of_columns = false;
  // The outputs of a direction share no memory: an op returns them.
  bool apart_row = false, apart_col = false;
  std::array<c10::SymInt, 2> origin = {0, 0};  // of x within the whole
  Groups groups = {};                          // of the rows of x
  std::optional<Tensor> row_ids = {};          // int32 (rows): rowwise rows of the random counter
  std::int64_t first_expert = 0;               // the number of the first group or matrix
  // Scales +delayed directions by the history instead of amax_row and amax_col, and raises the
  // history instead of returning their current amaxes.
  std::optional<HistoryRows> history = {};
};

// Returns the amax of x, or of each of its rows, as a cast with these options scales by: fp32.
Tensor amax(const Tensor& x, const std::string& spec, bool columnwise,
            const QuantizeOptions& options = {});

// Quantizes x, fp32 or bf16 (rows, cols) or (batch, rows, cols), rowwise and columnwise.
// row, col: spec texts; "": without this direction.
Directions quantize(const Tensor& x, const std::string& row, const std::string& col,
                    const QuantizeOptions& options);

// The result of an op that casts in both directions: codes, scale, amax and decoded values of each.
using EightTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
EightTensors eight_tensors(const Directions& operands);
Directions both_of(const EightTensors& tensors);

// Returns the options of an op without groups.   origin: two numbers, else an error
QuantizeOptions options_of(const char* op, const std::optional<Tensor>& amax_row,
                           const std::optional<Tensor>& amax_col, const std::optional<Tensor>& rng,
                           std::int64_t stream_row, std::int64_t stream_col,
                           c10::SymIntArrayRef origin, bool decoded_row, bool decoded_col);

// Returns the values of codes, (…, rows, padded cols).   dtype: float32 or bf16; table: of groups
Tensor dequantize(const QuantizedOperand& q, const std::string& spec, const c10::SymInt& cols,
                  at::ScalarType dtype, const std::optional<Tensor>& table = std::nullopt);

// Returns the bf16 values that an exact product reads, (rows, padded cols).
Tensor decode(const Tensor& codes, const Tensor& scale, const Spec& spec, c10::SymInt cols,
              const Groups& groups = {});

// Returns FP4 codes under power-of-two scales as FP8 codes of the same values, float8_e4m3fn (rows,
// padded cols), and an fp32 scale for each row, or each row of a group; see core/fp4_as_fp8.h.
std::pair<Tensor, Tensor> fp4_as_fp8(const Tensor& codes, const Tensor& scale, const Tensor& amax,
                                     const Spec& spec, c10::SymInt cols, const Groups& groups = {});

// Returns the Hadamard transform of x in bf16, of its transpose if columnwise.
//   points: 16, 32, 64 or 128; signs: a bit a point, repeated every 16
Tensor hadamard(const Tensor& x, std::int64_t points, bool columnwise, std::int64_t signs);
// Undoes the randomised transform of rows (M, whole transforms), fp32, in fp32.
Tensor inverse_hadamard(const Tensor& rows, std::int64_t points);

// Returns one-byte scales (rows, cols) in the layout of core/swizzle.h, (padded rows, padded cols);
// of (batch, rows, cols), (batch, bytes). groups, offs: as the op takes them.
Tensor swizzle_scales(const Tensor& scale, const std::optional<Tensor>& offs = std::nullopt,
                      const std::string& groups = "");
// Returns scales (rows, cols) from that layout, of one matrix without groups.
Tensor unswizzle_scales(const Tensor& swizzled, const c10::SymInt& rows, const c10::SymInt& cols);

}  // namespace minifloat::torch_ops
