// minifloat/experts.h: the checks before a backend is called.
#include "minifloat/experts.h"

#include <algorithm>

#include "backends.h"
#include "memory_checks.h"
#include "minifloat/core/block.h"
#include "minifloat/error.h"
#include "minifloat/group_checks.h"
#include "on_device.h"
#include "quantize_checks.h"

namespace minifloat {
namespace {

// Returns the rows of gate or up, or of a matrix laid out as they are.   stride: elements
MemoryRows rows_like(const char* function, const SwiGlu& of, const void* first,
                     std::int64_t stride) {
  const std::int64_t size = size_of(of.dtype);
  check_stride(function, of.rows, stride);
  const std::int64_t cols = of.is_interleaved ? 2 * of.width - 1 : of.width;
  return {first, of.width == 0 ? 0 : of.rows, cols * size, of.rows > 1 ? stride * size : 0, size};
}

MemoryRows rows_read(const char* function, const SwiGlu& of, const void* first,
                     std::int64_t stride) {
  MemoryRows rows = rows_like(function, of, first, stride);
  rows.count = std::min(rows.count, rows_in_memory(of.groups, of.device, of.rows));
  return rows;
}

// Checks the arguments that all functions of SwiGLU take.
void check_swiglu(const char* function, const SwiGlu& of, Memory& memory) {
  check_device(function, of.device);
  check_dtype(function, of.dtype);
  MINIFLOAT_CHECK(of.activation == Activation::kSilu || of.activation == Activation::kGelu ||
                      of.activation == Activation::kGeluTanh,
                  function, ": expected an activation, got ", static_cast<int>(of.activation));
  MINIFLOAT_CHECK(of.rows >= 0 && of.width >= 0 && is_addressable({of.rows, of.width}), function,
                  ": expected rows and columns of at most 2^48 elements, got ", of.rows, " and ",
                  of.width);
  MINIFLOAT_CHECK(of.activation == Activation::kSilu || !(of.has_limit || of.is_interleaved),
                  function, ": expected gate and up apart and no limit of another activation");
  check_group_table(function, of.groups, of.device, 0, of.rows);
  if (of.groups) memory.reads("the groups", of.groups.table, bytes_of_table(of.groups), 4);
  memory.reads_rows("gate", rows_read(function, of, of.gate, of.gate_stride));
  if (of.up) memory.reads_rows("up", rows_read(function, of, of.up, of.up_stride));
  if (of.weights) memory.reads("weights", of.weights, of.rows * 4, 4);
  if (of.places) memory.reads("places", of.places, of.rows * 4, 4);
  check_index(function, "places", of.places, of.rows, of.rows, of.device);
}

// Checks the gradients of gate and up, which are written.
void check_gradients(const char* function, const SwiGlu& of, const SwiGluGradients& d,
                     Memory& memory) {
  MINIFLOAT_CHECK(of.rows * of.width == 0 || (d.up != nullptr) == (of.up != nullptr), function,
                  ": expected the gradient of up where that is not ones, got ",
                  d.up ? "one without up" : "none");
  const MemoryRows gate = rows_like(function, of, d.gate, d.stride),
                   up = rows_like(function, of, d.up, d.stride);
  if (!d.up || !of.is_interleaved) {
    memory.writes_rows("the gradient of gate", gate);
    if (d.up) memory.writes_rows("the gradient of up", up);
    return;
  }
  const auto between =
      reinterpret_cast<std::uintptr_t>(d.up) - reinterpret_cast<std::uintptr_t>(d.gate);
  MINIFLOAT_CHECK(
      of.rows * of.width == 0 || between == static_cast<std::uintptr_t>(size_of(of.dtype)),
      function, ": expected the gradient of up one element behind that of gate");
  memory.writes_rows("the gradients", {gate.first, gate.count, 2 * of.width * gate.alignment,
                                       gate.stride, gate.alignment});
}

// Checks the gradients of a SwiGLU.   may_be_dh: whether that of gate may take dh's place
void check_backward(const char* function, const SwiGlu& of, const SwiGluGradients& d,
                    bool may_be_dh, Memory& memory) {
  SwiGlu like_h = of;
  like_h.is_interleaved = false;
  const MemoryRows dh = rows_read(function, like_h, d.dh, d.dh_stride);
  if (!may_be_dh || d.gate != d.dh || d.stride != d.dh_stride) memory.reads_rows("dh", dh);
  check_gradients(function, of, d, memory);
  if (d.weights) memory.writes("the gradient of the weights", d.weights, of.rows * 4, 4);
  MINIFLOAT_CHECK(of.groups || !(d.of_gate || d.of_up), function,
                  ": expected groups of rows where amaxes are found, got none");
  MINIFLOAT_CHECK(!d.of_up || of.rows * of.width == 0 || (d.of_gate && of.up), function,
                  ": expected amaxes of the gradient of up beside those of gate's, and up");
  const auto up_at = reinterpret_cast<std::uintptr_t>(d.gate) +
                     static_cast<std::uintptr_t>(of.width * size_of(of.dtype));
  MINIFLOAT_CHECK(!d.of_gate || d.of_up || !d.up || of.is_interleaved || of.rows * of.width == 0 ||
                      reinterpret_cast<std::uintptr_t>(d.up) == up_at,
                  function,
                  ": expected amaxes of the gradient of up too, or gradients that are halves of "
                  "one matrix");
  for (const bool is_of_up : {false, true}) {
    const LineAmaxes& to = is_of_up ? d.of_up : d.of_gate;
    if (!to) continue;
    memory.writes("amaxes of rows", to.rows, of.rows * 4, 4);
    memory.writes("amaxes of columns", to.columns,
                  of.groups.count * d.matrix(of, is_of_up).cols * 4, 4);
  }
}

// Requires gate and up of a dense layer.
void check_dense(const char* function, const SwiGlu& of, Memory& memory) {
  check_swiglu(function, of, memory);
  MINIFLOAT_CHECK(!of.groups && !of.weights && !of.has_limit && !of.is_interleaved, function,
                  ": expected gate and up apart, without groups, weights and a limit");
}

}  // namespace

void swiglu(const SwiGlu& of, void* h, const Execution& execution) {
  Memory memory("swiglu");
  check_swiglu("swiglu", of, memory);
  if (of.rows * of.width == 0) return;
  memory.writes("h", h, of.rows * of.width * size_of(of.dtype), size_of(of.dtype));
  memory.require_apart();
  MINIFLOAT_ON(of.device, swiglu(of, h, execution));
}

void quantize_swiglu(const SwiGlu& of, const Operand* rowwise, const Operand* columnwise,
                     const Execution& execution) {
  Memory memory("quantize_swiglu");
  check_swiglu("quantize_swiglu", of, memory);
  check_operands(of.h_at(of.gate), rowwise, columnwise, memory);
  memory.require_apart();
  if (of.rows * of.width == 0)  // groups without rows have columns of zeros
    return quantize(of.h_at(of.gate), rowwise, columnwise, execution);
  MINIFLOAT_ON(of.device, quantize_swiglu(of, rowwise, columnwise, execution));
}

void swiglu_backward(const SwiGlu& of, const SwiGluGradients& gradients,
                     const Execution& execution) {
  Memory memory("swiglu_backward");
  check_swiglu("swiglu_backward", of, memory);
  check_backward("swiglu_backward", of, gradients, /*may_be_dh=*/false, memory);
  memory.require_apart();
  if (of.rows == 0 && !gradients.of_gate) return;
  MINIFLOAT_ON(of.device, swiglu_backward(of, gradients, execution));
}

void swiglu_backward_with_amaxes(const SwiGlu& of, const SwiGluGradients& gradients, float* amaxes,
                                 int count, const Operand* h_col, const Execution& execution) {
  constexpr const char* kFunction = "swiglu_backward_with_amaxes";
  Memory memory(kFunction);
  check_dense(kFunction, of, memory);
  check_backward(kFunction, of, gradients, /*may_be_dh=*/true, memory);
  MINIFLOAT_CHECK(count == 1 || count == 2, kFunction, ": expected 1 or 2 amaxes, got ", count);
  memory.writes("amaxes", amaxes, count * std::int64_t{4}, 4);
  const TensorRef x = of.h_at(of.gate);
  if (h_col) check_operands(x, nullptr, h_col, memory);
  memory.require_apart();
  if (of.rows * of.width == 0) {
    for (int i = 0; i < count; ++i) amax(x, {kWholeTensor}, amaxes + i, execution);
    if (h_col) quantize(x, nullptr, h_col, execution);
    return;
  }
  MINIFLOAT_CHECK(count == (of.up ? 2 : 1),
                  "swiglu_backward_with_amaxes: expected an amax of each gradient, got ", count);
  MINIFLOAT_ON(of.device,
               swiglu_backward_with_amaxes(of, gradients, amaxes, count, h_col, execution));
}

void quantize_swiglu_backward(const SwiGlu& of, const void* dh, std::int64_t dh_stride,
                              const SwiGluCasts& casts, const Execution& execution) {
  constexpr const char* kFunction = "quantize_swiglu_backward";
  Memory memory(kFunction);
  check_dense(kFunction, of, memory);
  const bool casts_up = casts.up_row || casts.up_col, is_empty = of.rows * of.width == 0;
  MINIFLOAT_CHECK(is_empty || casts_up == (of.up != nullptr), kFunction,
                  ": expected casts of the gradient of up, where that is not ones");
  const TensorRef x = of.h_at(of.gate);  // all have its shape
  memory.reads_rows("dh", rows_like(kFunction, of, dh, dh_stride));
  check_operands(x, casts.gate_row, casts.gate_col, memory);
  if (casts_up) check_operands(x, casts.up_row, casts.up_col, memory);
  if (casts.h_col) check_operands(x, nullptr, casts.h_col, memory);
  memory.require_apart();
  if (is_empty) {
    quantize(x, casts.gate_row, casts.gate_col, execution);
    if (casts_up) quantize(x, casts.up_row, casts.up_col, execution);
    if (casts.h_col) quantize(x, nullptr, casts.h_col, execution);
    return;
  }
  MINIFLOAT_ON(of.device, quantize_swiglu_backward(of, dh, dh_stride, casts, execution));
}

void take_rows(const TakeRows& copy, const Execution& execution) {
  check_device("take_rows", copy.device);
  MINIFLOAT_CHECK(1 <= copy.slots && copy.slots < (std::int64_t{1} << 31),
                  "take_rows: expected 1 to 2^31 - 1 slots, got ", copy.slots);
  MINIFLOAT_CHECK(is_addressable({copy.rows, copy.row_bytes}) &&
                      is_addressable({copy.from_rows, copy.row_bytes}),
                  "take_rows: expected rows of at most 2^48 bytes in all, got ", copy.from_rows,
                  " of ", copy.row_bytes, " for ", copy.rows);
  if (copy.rows * copy.row_bytes == 0) return;
  Memory memory("take_rows");
  memory.reads_rows("the rows", {copy.from, copy.from_rows, copy.row_bytes, copy.from_stride});
  memory.reads("the index", copy.index, copy.rows * 4, 4);
  if (copy.places) memory.reads("places", copy.places, copy.rows * 4, 4);
  memory.writes("the copies", copy.to, copy.rows * copy.row_bytes);
  memory.require_apart();
  // The numbers in index are below 2^31, so rows of `from` beyond have none.
  const std::int64_t numbers = std::min(copy.from_rows, std::int64_t{1} << 31) * copy.slots;
  MINIFLOAT_CHECK(!copy.places || copy.rows == numbers, "take_rows: expected places of ", copy.rows,
                  " rows, got ", copy.from_rows, " of ", copy.slots, " slots");
  check_index("take_rows", "rows", copy.index, copy.rows, numbers, copy.device);
  MINIFLOAT_ON(copy.device, take_rows(copy, execution));
}

RowLayout::RowLayout(const std::vector<std::int64_t>& field_bytes) {
  constexpr std::int64_t kField = 4, kRow = 16;
  for (const std::int64_t bytes : field_bytes) {
    check_size("RowLayout", "bytes of a field", bytes);
    begins.push_back(round_up(row_bytes, kField));
    row_bytes = begins.back() + bytes;
  }
  row_bytes = round_up(row_bytes, kRow);
}

RowLayout PackRows::layout() const {
  std::vector<std::int64_t> bytes;
  for (const RowField& field : fields) bytes.push_back(field.bytes);
  return RowLayout(bytes);
}

void pack_rows(const PackRows& pack, const Execution& execution) {
  check_device("pack_rows", pack.device);
  MINIFLOAT_CHECK(pack.fields.size() <= kMaxRowFields, "pack_rows: expected at most ",
                  kMaxRowFields, " fields, got ", pack.fields.size());
  check_size("pack_rows", "from_rows", pack.from_rows);
  check_size("pack_rows", "rows", pack.rows);
  Memory memory("pack_rows");
  if (pack.index) memory.reads("the index", pack.index, pack.from_rows * 4, 4);
  if (pack.rows_from) memory.reads("rows_from", pack.rows_from, pack.rows * 4, 4);
  for (const RowField& field : pack.fields) {
    MINIFLOAT_CHECK(
        is_addressable({pack.rows, field.bytes}) && is_addressable({field.from_rows, field.bytes}),
        "pack_rows: expected rows of at most 2^48 bytes in all, got ", field.from_rows, " of ",
        field.bytes, " for ", pack.rows);
    MINIFLOAT_CHECK(0 <= field.slots && field.slots < (std::int64_t{1} << 31),
                    "pack_rows: expected 0 to 2^31 - 1 slots, got ", field.slots);
    MINIFLOAT_CHECK(field.slots == 0 || pack.index || pack.from_rows == 0,
                    "pack_rows: expected an index of a field with slots, got none");
    MINIFLOAT_CHECK(field.slots != 0 || field.from_rows == pack.from_rows,
                    "pack_rows: expected fields of ", pack.from_rows, " rows, got ",
                    field.from_rows);
    if (pack.rows > 0)
      memory.reads_rows("a field", {field.from, field.from_rows, field.bytes, field.from_stride});
    // The numbers in index are below 2^31, so rows of `from` beyond have none.
    const std::int64_t numbers = std::min(field.from_rows, std::int64_t{1} << 31) * field.slots;
    if (field.slots != 0)
      check_index("pack_rows", "rows", pack.index, pack.from_rows, numbers, pack.device);
  }
  MINIFLOAT_CHECK(pack.rows_from || pack.rows == pack.from_rows, "pack_rows: expected ",
                  pack.from_rows, " rows, got ", pack.rows);
  check_index("pack_rows", "rows_from", pack.rows_from, pack.rows, pack.from_rows, pack.device,
              /*least=*/-1);
  if (pack.rows == 0 || pack.fields.empty()) return;
  memory.writes("the rows", pack.to, pack.rows * pack.layout().row_bytes);
  memory.require_apart();
  MINIFLOAT_ON(pack.device, pack_rows(pack, execution));
}

void add_slots(const AddSlots& sum, const Execution& execution) {
  check_device("add_slots", sum.device);
  MINIFLOAT_CHECK(is_addressable({sum.tokens, sum.cols}) && is_addressable({sum.count, sum.cols}) &&
                      is_addressable({sum.tokens, sum.slots}),
                  "add_slots: expected at most 2^48 elements, got ", sum.tokens, " sums of ",
                  sum.slots, " rows of ", sum.count, ", of ", sum.cols, " columns");
  check_dtype("add_slots", sum.dtype);
  if (sum.tokens * sum.cols == 0) return;
  const std::int64_t size = size_of(sum.dtype);
  check_stride("add_slots", sum.count, sum.stride);
  Memory memory("add_slots");
  memory.reads_rows("the rows", {sum.rows, sum.count, sum.cols * size,
                                 sum.count > 1 ? sum.stride * size : 0, size});
  memory.reads("places", sum.places, sum.tokens * sum.slots * 4, 4);
  if (sum.base) memory.reads("the base", sum.base, sum.tokens * sum.cols * 4, 4);
  memory.writes("the sums", sum.to, sum.tokens * sum.cols * size, size);
  memory.require_apart();
  check_index("add_slots", "places", sum.places, sum.tokens * sum.slots, sum.count, sum.device,
              /*least=*/-1);
  MINIFLOAT_ON(sum.device, add_slots(sum, execution));
}

}  // namespace minifloat
