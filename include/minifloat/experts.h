// The operations between products: SwiGLU, or another activation in its place, and the copies
// between tokens and rows of experts.
// Each is one pass over memory. A place or an index out of range raises Error on the CPU; on a GPU
// the comments below say what follows.
#pragma once

#include <cstdint>
#include <vector>

#include "minifloat/core/activation.h"
#include "minifloat/groups.h"
#include "minifloat/quantize.h"
#include "minifloat/tensor_ref.h"

namespace minifloat {

// Gate and up of a SwiGLU (core/swiglu.h). Strides of rows are in elements.
struct SwiGlu {
  const void* gate = nullptr;  // (rows, width), adjacent columns; with is_interleaved every second
  const void* up = nullptr;    // the same; with is_interleaved gate + 1; null: ones
  Activation activation = Activation::kSilu;  // any, where gate and up lie apart, without a limit
  DType dtype = DType::kFloat32;
  std::int64_t rows = 0, width = 0;
  std::int64_t gate_stride = 0, up_stride = 0;
  bool is_interleaved = false;
  const float* weights = nullptr;  // (rows); null: ones
  // The place of each row's weight, (rows), each place once; null: the row's position. A place out
  // of range is a weight of zero.
  const std::int32_t* places = nullptr;
  GroupTable groups = {};  // rows past the last group are not read; their results are zeros
  bool has_limit = false;
  float limit = 0, alpha = 1;  // where there is a limit
  Device device = Device::kCpu;

  // Returns the values of h, (rows, width), contiguous at `h`.
  TensorRef h_at(const void* h) const {
    return {.data = h,
            .dtype = dtype,
            .rows = rows,
            .cols = width,
            .row_stride = width,
            .device = device,
            .groups = groups};
  }
};

// Writes h, rounded once.   h: (rows, width), contiguous, of the dtype
void swiglu(const SwiGlu& of, void* h, const Execution& execution);

// Quantizes h in both directions, to the bytes that `quantize` makes of swiglu's h; null: that
// direction is not cast. A GPU writes no h where gate and up are bf16 and a kernel for the specs
// and sizes is compiled. Of groups, those are specs that need no amax of whole columns or matrices;
// without groups such amaxes are found by a read of gate and up before the cast.
//   of.groups: as those of `quantize`, whose columnwise operand has their unit
void quantize_swiglu(const SwiGlu& of, const Operand* rowwise, const Operand* columnwise,
                     const Execution& execution = {});

// The amaxes of a matrix in groups: of each row before the last group's end, and of each group's
// columns.
struct LineAmaxes {
  float* rows = nullptr;     // (rows)
  float* columns = nullptr;  // (groups, columns)

  explicit operator bool() const { return rows || columns; }
};

// The gradients of a SwiGLU: of gate and up, laid out as those, and of the weights.
struct SwiGluGradients {
  const void* dh = nullptr;  // (rows, width)
  std::int64_t dh_stride = 0;
  void* gate = nullptr;      // (rows, width), as SwiGlu's
  void* up = nullptr;        // null where SwiGlu's is
  std::int64_t stride = 0;   // of gate's and up's rows
  float* weights = nullptr;  // (rows), at the rows' places; zero at a place of no row; null: none
  // Of groups, what casts of the gradients scale by; null: not found. Of the matrix with gate's
  // gradient, and of that with up's. With an up but without the second, both gradients are halves
  // of one matrix of 2 * width columns, or take turns in it.
  LineAmaxes of_gate = {}, of_up = {};

  // Returns the values of the matrix with the gradient of gate, or with that of up.
  TensorRef matrix(const SwiGlu& of, bool is_of_up) const {
    TensorRef x = of.h_at(is_of_up ? up : gate);
    x.cols = up && !of_up ? 2 * of.width : of.width;
    x.row_stride = stride;
    return x;
  }
};
void swiglu_backward(const SwiGlu& of, const SwiGluGradients& gradients,
                     const Execution& execution);

// Specs that are scaled by the amax of a whole tensor, and of each row; untransformed.
inline constexpr Spec kWholeTensor = {.elements = Elements::kE4m3, .rule = ScaleRule::kTensor};
inline constexpr Spec kEachRow = {.elements = Elements::kE4m3, .rule = ScaleRule::kRow};

// Writes the gradients of gate and up and their amaxes, and casts h columnwise as quantize_swiglu
// does; null: not cast. Without groups, weights and a limit, gate and up apart. gradients.gate may
// be dh. A GPU reads dh, gate and up once, where they are bf16, of whole tiles of 128 x 128, and h
// is scaled by an amax that the caller passes.
//   amaxes: of d_gate and, with an up, of d_up, untransformed; count: of those
void swiglu_backward_with_amaxes(const SwiGlu& of, const SwiGluGradients& gradients, float* amaxes,
                                 int count, const Operand* h_col, const Execution& execution);

// The casts of the gradients of gate and up, and of h columnwise; null: not cast.
struct SwiGluCasts {
  const Operand *gate_row = nullptr, *gate_col = nullptr;
  const Operand *up_row = nullptr, *up_col = nullptr;  // null where SwiGlu's up is
  const Operand* h_col = nullptr;
};
// Quantizes to the bytes that `quantize` makes of swiglu_backward's results and of swiglu's h.
// Without groups, weights and a limit, gate and up apart. A GPU writes no values where they are
// bf16, of whole tiles of 128 x 128, and a kernel for the specs is compiled.
//   dh: (rows, width), rows `dh_stride` elements apart
void quantize_swiglu_backward(const SwiGlu& of, const void* dh, std::int64_t dh_stride,
                              const SwiGluCasts& casts, const Execution& execution = {});

// Copies of rows: to[r] = from[index[r] / slots].
struct TakeRows {
  const void* from = nullptr;                                  // (from_rows, row_bytes)
  std::int64_t from_rows = 0, from_stride = 0, row_bytes = 0;  // bytes
  const std::int32_t* index = nullptr;                         // (rows)
  std::int64_t rows = 0, slots = 1;
  // The inverse of `index`, (from_rows, slots), rows = from_rows * slots; null: unknown. With it a
  // GPU reads each row of `from` once. The result does not depend on it.
  const std::int32_t* places = nullptr;
  void* to = nullptr;  // (rows, row_bytes), contiguous; zeros where an index is out of range
  Device device = Device::kCpu;
};
void take_rows(const TakeRows& copy, const Execution& execution);

// A field of rows of bytes, whose part of row n is a row of `from`.
struct RowField {
  const void* from = nullptr;                              // (from_rows, bytes)
  std::int64_t from_rows = 0, from_stride = 0, bytes = 0;  // bytes
  std::int64_t slots = 0;                                  // row index[n] / slots; 0: row n
};
inline constexpr std::size_t kMaxRowFields = 6;

// Where fields of these bytes begin in a row: at multiples of 4. A row's length is one of 16.
struct RowLayout {
  std::vector<std::int64_t> begins;
  std::int64_t row_bytes = 0;

  explicit RowLayout(const std::vector<std::int64_t>& field_bytes);
};

// Copies fields side by side into rows of bytes, which one message sends: to[r] has the fields of
// row n = rows_from[r].
struct PackRows {
  std::vector<RowField> fields;             // at most kMaxRowFields
  const std::int32_t* index = nullptr;      // (from_rows); null where no field has slots
  std::int64_t from_rows = 0;               // n is below
  const std::int32_t* rows_from = nullptr;  // (rows), -1: a row of zeros; null: n = r
  std::int64_t rows = 0;                    // from_rows where rows_from is null
  void* to = nullptr;  // (rows, bytes of the layout); zeros between fields, and of numbers out of
                       // range
  Device device = Device::kCpu;

  RowLayout layout() const;
};
void pack_rows(const PackRows& pack, const Execution& execution);

// Sums of rows: to[t] = base[t] + Σ over s of rows[places[t, s]], in fp32 in the order of s,
// rounded once. The place -1 adds nothing.
struct AddSlots {
  const void* rows = nullptr;  // (count, cols)
  DType dtype = DType::kFloat32;
  std::int64_t count = 0, stride = 0, cols = 0;
  const std::int32_t* places = nullptr;  // (tokens, slots)
  std::int64_t tokens = 0, slots = 0;
  const float* base = nullptr;  // (tokens, cols); null: zeros
  void* to = nullptr;           // (tokens, cols), contiguous, of the dtype
  Device device = Device::kCpu;
};
void add_slots(const AddSlots& sum, const Execution& execution);

}  // namespace minifloat
