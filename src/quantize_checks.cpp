#include "quantize_checks.h"

#include <algorithm>
#include <cstdint>

#include "minifloat/core/philox.h"
#include "minifloat/core/swizzle.h"
#include "minifloat/error.h"
#include "minifloat/group_checks.h"
#include "on_device.h"

namespace minifloat {

void check_sizes(const char* function, std::int64_t batch, std::int64_t rows, std::int64_t cols) {
  MINIFLOAT_CHECK(is_addressable({batch, rows, cols}), function,
                  ": expected sizes of zero or more, 2^48 elements at most, got batch ", batch,
                  ", rows ", rows, ", cols ", cols);
}

void check_spec(const char* function, const Spec& spec) {
  MINIFLOAT_CHECK(spec.is_valid(), function, ": expected a spec that Spec::parse returns, got ",
                  "elements ", static_cast<int>(spec.elements), ", rule ",
                  static_cast<int>(spec.rule), ", blocks of ", spec.block_rows, " x ",
                  spec.block_cols, ", scale rounding ", static_cast<int>(spec.scale_rounding),
                  ", stochastic ", spec.stochastic, ", delayed ", spec.delayed, ", transform ",
                  spec.transform);
}

void check_random(const char* function, const Spec& spec, const Random& random, Memory& memory) {
  MINIFLOAT_CHECK(random.state, function, ": ", spec.str(),
                  " rounds stochastically and needs a random state (seed, count), got null");
  MINIFLOAT_CHECK(random.state_size == 2 || random.state_size == 3, function,
                  ": expected a random state of 2 or 3 numbers, got ", random.state_size);
  memory.reads("the random state", random.state, random.state_size * std::int64_t{8}, 8);
}

// ---- Values -------------------------------------------------------------------------------------
namespace {

// Adds the memory of the matrices at x.data.   rows: of each there
void add_matrices(const char* function, const TensorRef& x, std::int64_t rows, Memory& memory) {
  if (x.batch * rows * x.cols == 0) return;
  MINIFLOAT_CHECK(x.data, function, ": expected values, got null");
  const std::int64_t size = size_of(x.dtype);
  check_stride(function, rows, x.row_stride);
  check_stride(function, x.batch, x.batch_stride);
  if (!x.rows_from) rows = rows_in_memory(x.groups, x.device, rows);
  const std::int64_t last_row = rows > 1 ? (rows - 1) * x.row_stride : 0,
                     last = x.batch > 1 ? (x.batch - 1) * x.batch_stride : 0;
  const std::int64_t begin = std::min<std::int64_t>(last_row, 0) + std::min<std::int64_t>(last, 0),
                     end = std::max<std::int64_t>(last_row, 0) + std::max<std::int64_t>(last, 0) +
                           x.cols;
  const auto first =
      reinterpret_cast<std::uintptr_t>(x.data) + static_cast<std::uintptr_t>(begin * size);
  memory.reads("x", reinterpret_cast<const void*>(first), (end - begin) * size, size);
}

// Checks the rows that are read, where an index names them.
void check_rows_from(const char* function, const TensorRef& x, Memory& memory) {
  if (!x.rows_from) return;
  MINIFLOAT_CHECK(x.groups, function, ": expected rows_from with groups");
  check_sizes(function, 1, x.from_rows, x.cols);
  MINIFLOAT_CHECK(x.from_rows > 0 || x.rows == 0, function,
                  ": expected from_rows, the rows that rows_from names, got none for ", x.rows);
  memory.reads("rows_from", x.rows_from, x.rows * std::int64_t{4}, 4);
  const bool is_on_host = x.device == Device::kCpu;
  check_index(function, "rows_from", x.rows_from,
              is_on_host ? x.groups.of_rows()[x.groups.count] : 0, x.from_rows, x.device);
}

}  // namespace

void check_values(const char* function, const TensorRef& x, Memory& memory) {
  check_device(function, x.device);
  check_dtype(function, x.dtype);
  check_sizes(function, x.batch, x.rows, x.cols);
  MINIFLOAT_CHECK(!x.groups || x.batch == 1, function,
                  ": expected one matrix with groups, got a batch of ", x.batch);
  check_group_table(function, x.groups, x.device, 0, x.rows);
  if (x.groups) memory.reads("the groups", x.groups.table, bytes_of_table(x.groups), 4);
  check_rows_from(function, x, memory);
  const std::int64_t rows = x.rows_from ? x.from_rows : x.rows;
  MINIFLOAT_CHECK(rows <= 1 || x.row_stride >= x.cols || x.row_stride <= -x.cols, function,
                  ": expected a row stride of at least ", x.cols, " elements, got ", x.row_stride);
  add_matrices(function, x, rows, memory);
}

void check_groups(const char* function, const TensorRef& x, std::int64_t unit) {
  const GroupTable& groups = x.groups;
  if (!groups || unit == 0) return;
  MINIFLOAT_CHECK(is_group_unit(groups.unit) && groups.unit % unit == 0, function,
                  ": expected a unit of 16, 32, 64 or 128 columns that is a multiple of ", unit,
                  ", got ", groups.unit);
  const std::int64_t cols = grouped_cols<std::int64_t>(x.rows, groups.unit, groups.count);
  check_sizes(function, 1, x.cols, cols);
  check_group_table(function, groups, x.device, groups.unit, cols);
}

void check_groups(const char* function, const TensorRef& x, const Spec& spec, bool columnwise) {
  check_groups(function, x, columnwise ? spec.group_unit() : 0);
  MINIFLOAT_CHECK(!x.groups || !spec.has_blocks_2d(), function, ": ", spec.str(),
                  " has blocks of several rows, which the end of a group would cut; expected a "
                  "spec with blocks of one row for values in groups");
}

// ---- Operands that are written ------------------------------------------------------------------
namespace {

// The sizes of an operand's buffers.
struct OperandSizes {
  std::int64_t matrices, parts, rows, cols;  // rows and columns as read, those of groups padded
  std::int64_t rows_of_parts;                // rows that have a scale each

  OperandSizes(const TensorRef& x, bool columnwise)
      : matrices(x.groups ? 1 : x.batch),
        parts(x.groups ? x.groups.count : x.batch),
        rows(columnwise ? x.cols : x.rows),
        cols(columnwise ? x.rows : x.cols),
        rows_of_parts((x.groups && columnwise ? parts : matrices) * rows) {
    if (x.groups && columnwise)
      cols = grouped_cols<std::int64_t>(x.rows, x.groups.unit, x.groups.count);
  }
  std::int64_t amaxes(const Spec& spec) const {
    return spec.has_row_amax() ? rows_of_parts : spec.has_tensor_amax() ? parts : 0;
  }
  std::int64_t code_bytes(const Operand& o) const {
    return matrices * rows * (o.as_fp8 ? o.spec.padded_cols(cols) : o.spec.code_cols(cols));
  }
  std::int64_t scale_bytes(const Operand& o) const {
    if (o.as_fp8) return rows_of_parts * std::int64_t{4};
    if (!o.spec.has_blocks()) return amaxes(o.spec) * std::int64_t{4};
    if (o.swizzled) return matrices * swizzled_size(rows, o.spec.scale_cols(cols));
    return matrices * o.spec.scale_rows(rows) * o.spec.scale_cols(cols) * o.spec.scale_bytes();
  }
};

// Checks the origin: a column within a block has other codes than the whole's, and the random
// counter (core/philox.h) has 32 bits for the row and 32 for each 16 columns.
//   rows: of all parts
void check_origin(const Operand& operand, std::int64_t rows, std::int64_t cols) {
  const Spec& spec = operand.spec;
  const Origin& origin = operand.origin;
  constexpr std::int64_t kRows = std::int64_t{1} << 32, kCols = kElementsPerCall * kRows;
  MINIFLOAT_CHECK(origin.row >= 0 && origin.col >= 0,
                  "quantize: expected an origin of zero or more, got (", origin.row, ", ",
                  origin.col, ")");
  const int aligned = std::max(spec.col_alignment(), spec.stochastic ? kElementsPerCall : 1);
  MINIFLOAT_CHECK(origin.col % aligned == 0,
                  "quantize: expected an origin along the contraction dimension that is a multiple "
                  "of ",
                  aligned, " under ", spec.str(), ", got ", origin.col);
  if (!spec.stochastic) return;
  MINIFLOAT_CHECK(
      rows <= kRows && origin.row <= kRows - rows && cols <= kCols && origin.col <= kCols - cols,
      "quantize: expected rows up to 2^32 and columns up to 2^36 under ", spec.str(),
      ", as its random bits repeat beyond; got rows [", origin.row, ", ", origin.row, " + ", rows,
      ") and columns [", origin.col, ", ", origin.col, " + ", cols, ") as read");
}

// Checks an operand whose rows lie apart, and adds its codes and scales.
void check_row_bytes(const TensorRef& x, const Operand& operand, bool columnwise, Memory& memory) {
  const Spec& spec = operand.spec;
  MINIFLOAT_CHECK(!columnwise && x.batch == 1 && !x.groups && !operand.as_fp8 &&
                      spec.has_blocks() && !spec.has_blocks_2d(),
                  "quantize: expected row_bytes of one rowwise matrix with blocks of one row, got ",
                  spec.str());
  const std::int64_t codes = spec.code_cols(x.cols),
                     scales = spec.scale_cols(x.cols) * spec.scale_bytes();
  MINIFLOAT_CHECK(
      operand.row_bytes >= std::max(codes, scales) && operand.row_bytes % spec.scale_bytes() == 0,
      "quantize: expected row_bytes of ", std::max(codes, scales), " or more, a multiple of ",
      spec.scale_bytes(), ", got ", operand.row_bytes);
  const std::int64_t rows = operand.codes ? x.rows : 0;  // null: the values alone
  memory.writes_rows("codes", {operand.codes, rows, codes, operand.row_bytes});
  memory.writes_rows("scales",
                     {operand.scale, x.rows, scales, operand.row_bytes, spec.scale_bytes()});
}

void check_forms(const Operand& operand, bool columnwise) {
  const Spec& spec = operand.spec;
  MINIFLOAT_CHECK(!spec.is_bf16(),
                  "quantize: bf16 is the identity and has no codes; expected a quantizing spec");
  MINIFLOAT_CHECK(!operand.as_fp8 || spec.is_fp4_by_powers_of_two(),
                  "quantize: expected 4-bit codes under powers of two (mxfp4, nvfp4+pow2, "
                  "e1m2/1x32 or e1m2/1x16+pow2) as FP8, got ",
                  spec.str());
  MINIFLOAT_CHECK(!operand.as_fp8 || !operand.decoded, "quantize: expected FP8 codes of ",
                  spec.str(), " or decoded values, got both");
  MINIFLOAT_CHECK(!operand.decoded || !spec.has_fp32_values(),
                  "quantize: expected decoded values that bf16 holds, got those of ", spec.str(),
                  ", which are fp32");
  MINIFLOAT_CHECK(!operand.given_amax || spec.has_tensor_amax() || spec.has_row_amax(),
                  "quantize: ", spec.str(), " has no tensor or row amax to be given");
  MINIFLOAT_CHECK(
      !operand.history.first || (spec.delayed && operand.given_amax && !operand.amax),
      "quantize: expected a history instead of an amax output, beside an active amax under "
      "+delayed");
  MINIFLOAT_CHECK(
      !operand.amaxes_of_columns || (!columnwise && spec.has_row_amax() && spec.transform == 0),
      "quantize: expected amaxes_of_columns of a rowwise operand with an untransformed scale a "
      "row, got ",
      spec.str(), columnwise ? " columnwise" : "");
}

// Adds the entries of an amax history. Those of two operands may take turns in one memory.
void check_history(const HistoryEntries& history, std::int64_t count, Memory& memory) {
  if (!history.first || count == 0) return;
  check_stride("quantize", count, history.stride);
  memory.writes_rows("entries of a history",
                     {history.first, count, 4, count > 1 ? history.stride * 4 : 0, 4});
}

void check_operand(const TensorRef& x, const Operand& operand, bool columnwise, Memory& memory) {
  constexpr const char* kFunction = "quantize";
  const Spec& spec = operand.spec;
  check_spec(kFunction, spec);
  check_forms(operand, columnwise);
  check_groups(kFunction, x, spec, columnwise);
  const OperandSizes sizes(x, columnwise);
  const std::int64_t amaxes = sizes.amaxes(spec) * std::int64_t{4};
  MINIFLOAT_CHECK(!operand.swizzled || (spec.has_blocks() && spec.scale_bytes() == 1 &&
                                        !operand.as_fp8 && !x.groups && operand.row_bytes == 0),
                  "quantize: expected swizzled scales of one byte a block, as MX and NVFP4 have "
                  "them, of matrices without groups, row_bytes or as_fp8, got ",
                  spec.str());
  check_origin(operand, columnwise ? sizes.rows_of_parts : sizes.matrices * sizes.rows,
               columnwise ? x.rows : x.cols);

  const std::int64_t code_bytes = sizes.code_bytes(operand);
  MINIFLOAT_CHECK(operand.codes || operand.decoded || code_bytes == 0,
                  "quantize: expected a buffer for the codes of ", spec.str(),
                  " or for their values, got null");
  MINIFLOAT_CHECK(operand.scale || sizes.scale_bytes(operand) == 0,
                  "quantize: expected a scale buffer for ", spec.str(), ", got null");
  if (operand.row_bytes != 0) {
    check_row_bytes(x, operand, columnwise, memory);
  } else {
    if (operand.codes) memory.writes("codes", operand.codes, code_bytes);
    memory.writes("scales", operand.scale, sizes.scale_bytes(operand),
                  operand.as_fp8 ? 4 : spec.scale_bytes());
  }
  if (operand.decoded)
    memory.writes("decoded values", operand.decoded,
                  2 * sizes.matrices * sizes.rows * spec.padded_cols(sizes.cols), 16);
  if (operand.amax) memory.writes("amaxes", operand.amax, amaxes, 4);
  if (operand.given_amax) memory.reads("given amaxes", operand.given_amax, amaxes, 4);
  check_history(operand.history, sizes.parts, memory);
  if (operand.amaxes_of_columns)
    memory.writes("amaxes of columns", operand.amaxes_of_columns,
                  sizes.parts * x.cols * std::int64_t{4}, 4);
  if (operand.random.row_ids) {
    MINIFLOAT_CHECK(x.groups && !columnwise,
                    "quantize: expected row ids of a rowwise operand with groups alone");
    memory.reads("row ids", operand.random.row_ids, x.rows * std::int64_t{4}, 4);
  }
  if (spec.stochastic) check_random(kFunction, spec, operand.random, memory);
}

}  // namespace

std::int64_t amaxes_of(const TensorRef& x, const Spec& spec, bool columnwise) {
  return OperandSizes(x, columnwise).amaxes(spec);
}

void check_operands(const TensorRef& x, const Operand* rowwise, const Operand* columnwise,
                    Memory& memory) {
  MINIFLOAT_CHECK(rowwise || columnwise,
                  "quantize: expected a rowwise or a columnwise operand, got neither");
  if (rowwise) check_operand(x, *rowwise, false, memory);
  if (columnwise) check_operand(x, *columnwise, true, memory);
}

// ---- Operands that are read ---------------------------------------------------------------------
namespace {

// Checks the groups of an operand, where there are any.
void check_groups(const char* function, const Quantized& q) {
  const GroupTable& groups = q.groups;
  if (!groups) return check_group_table(function, groups, q.device, 0, 0);
  const Spec& spec = q.spec;
  MINIFLOAT_CHECK(q.batch == 1, function, ": expected one matrix with groups, got a batch of ",
                  q.batch);
  MINIFLOAT_CHECK(!spec.has_blocks_2d(), function, ": ", spec.str(),
                  " has blocks of several rows, which the end of a group would cut");
  if (groups.unit == 0) return check_group_table(function, groups, q.device, 0, q.rows);
  MINIFLOAT_CHECK(is_group_unit(groups.unit) && groups.unit % spec.group_unit() == 0 &&
                      q.cols % groups.unit == 0 && q.cols / groups.unit >= groups.count,
                  function,
                  ": expected columns in units of 16, 32, 64 or 128 that are a multiple "
                  "of ",
                  spec.group_unit(), ", at least one a group, got ", q.cols,
                  " columns in units of ", groups.unit, " for ", groups.count, " groups");
  check_group_table(function, groups, q.device, groups.unit, q.cols);
}

std::int64_t scales_of(const Quantized& q) {
  const Spec& spec = q.spec;
  if (spec.has_blocks()) return q.batch * spec.scale_rows(q.rows) * spec.scale_cols(q.cols);
  if (spec.has_tensor_amax()) return q.parts();
  return q.groups && q.groups.unit > 0 ? q.groups.count * q.rows : q.batch * q.rows;
}

}  // namespace

void check_tensor_factor(const char* function, const Quantized& q, Memory& memory) {
  check_device(function, q.device);
  check_spec(function, q.spec);
  check_sizes(function, q.batch, q.rows, q.cols);
  check_groups(function, q);
  if (q.groups) memory.reads("the groups", q.groups.table, bytes_of_table(q.groups), 4);
  const std::int64_t bytes = q.factors() * std::int64_t{4};
  const bool has_amax = q.spec.has_outer_amax();
  MINIFLOAT_CHECK(!has_amax || q.amax || bytes == 0, function, ": ", q.spec.str(),
                  " needs the amax that its scales were made with, got null");
  if (has_amax) memory.reads("the tensor amax", q.amax, bytes, 4);
  if (q.spec.rule == ScaleRule::kTensor) memory.reads("the scale", q.scale, bytes, 4);
}

void check_quantized(const char* function, const Quantized& q, Memory& memory) {
  check_device(function, q.device);
  check_spec(function, q.spec);
  MINIFLOAT_CHECK(!q.spec.is_bf16(), function, ": bf16 is the identity and has no codes");
  check_sizes(function, q.batch, q.rows, q.cols);
  check_groups(function, q);
  if (q.groups) memory.reads("the groups", q.groups.table, bytes_of_table(q.groups), 4);
  MINIFLOAT_CHECK((q.codes && q.scale) || !has_elements(q), function,
                  ": expected codes and scale, got null");
  if (!has_elements(q)) return;
  memory.reads("codes", q.codes, q.batch * q.rows * q.spec.code_cols(q.cols));
  memory.reads("the scale", q.scale, scales_of(q) * q.spec.scale_bytes(), q.spec.scale_bytes());
}

}  // namespace minifloat
