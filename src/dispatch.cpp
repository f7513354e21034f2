// The functions of minifloat/quantize.h and transform.h: each checks its arguments, then calls the
// device's backend. Nothing is written before every check has passed. Experts, groups, histories
// and grouped products have files of their own beside this one; GEMMs of dense layers are torch/'s.
#include <algorithm>
#include <cstdint>

#include "cpu/backend.h"
#if defined(MINIFLOAT_WITH_CUDA)
#include "cuda/backend.h"
#endif
#include "minifloat/core/philox.h"
#include "minifloat/core/swizzle.h"
#include "minifloat/error.h"
#include "minifloat/group_checks.h"
#include "on_device.h"
#include "quantize_checks.h"

namespace minifloat {
namespace {

void check_sizes(const char* function, std::int64_t batch, std::int64_t rows, std::int64_t cols) {
  MINIFLOAT_CHECK(is_addressable({batch, rows, cols}), function,
                  ": expected sizes of zero or more, 2^48 elements at most, got batch ", batch,
                  ", rows ", rows, ", cols ", cols);
}

void check_values(const char* function, const TensorRef& x) {
  check_device(function, x.device);
  check_sizes(function, x.batch, x.rows, x.cols);
  MINIFLOAT_CHECK(x.data || x.batch * x.rows * x.cols == 0, function,
                  ": expected values, got null");
  MINIFLOAT_CHECK(x.rows <= 1 || x.row_stride >= x.cols || x.row_stride <= -x.cols, function,
                  ": expected a row stride of at least ", x.cols, " elements, got ", x.row_stride);
  MINIFLOAT_CHECK(!x.rows_from || x.groups, function, ": expected rows_from with groups");
}

// Checks the groups of values, where there are any. unit: the least of the columnwise operand; 0:
// none is read.
void check_groups(const char* function, const TensorRef& x, std::int64_t unit) {
  const GroupTable& groups = x.groups;
  if (!groups) return;
  MINIFLOAT_CHECK(x.batch == 1, function, ": expected one matrix with groups, got a batch of ",
                  x.batch);
  MINIFLOAT_CHECK(0 <= groups.count && groups.count <= kMostGroups, function, ": expected at most ",
                  kMostGroups, " groups, got ", groups.count);
  check_group_table(function, groups, x.device, 0, x.rows);
  if (unit == 0) return;
  MINIFLOAT_CHECK(is_group_unit(groups.unit) && groups.unit % unit == 0, function,
                  ": expected a unit of 16, 32, 64 or 128 columns that is a multiple of ", unit,
                  ", got ", groups.unit);
  check_group_table(function, groups, x.device, groups.unit,
                    grouped_cols<std::int64_t>(x.rows, groups.unit, groups.count));
}

void check_groups(const char* function, const TensorRef& x, const Spec& spec, bool columnwise) {
  check_groups(function, x, columnwise ? spec.group_unit() : 0);
  MINIFLOAT_CHECK(!x.groups || !spec.has_blocks_2d(), function, ": ", spec.str(),
                  " has blocks of several rows, which the end of a group would cut; expected a "
                  "spec with blocks of one row for values in groups");
}

// Checks the groups of an operand, where there are any.
void check_groups(const char* function, const Quantized& q) {
  const GroupTable& groups = q.groups;
  if (!groups) return;
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

// Checks the random state that a stochastic spec reads.
void check_random(const char* function, const Spec& spec, const Random& random) {
  MINIFLOAT_CHECK(random.state, function, ": ", spec.str(),
                  " rounds stochastically and needs a random state (seed, count), got null");
  MINIFLOAT_CHECK(random.state_size == 2 || random.state_size == 3, function,
                  ": expected a random state of 2 or 3 numbers, got ", random.state_size);
}

// Checks the origin: the random counter (core/philox.h) has 32 bits for the row and 32 for each 16
// columns.
void check_origin(const Spec& spec, const Origin& origin, std::int64_t rows, std::int64_t cols) {
  constexpr std::int64_t kRows = std::int64_t{1} << 32, kCols = kElementsPerCall * kRows;
  MINIFLOAT_CHECK(origin.row >= 0 && origin.col >= 0,
                  "quantize: expected an origin of zero or more, got (", origin.row, ", ",
                  origin.col, ")");
  if (!spec.stochastic) return;
  MINIFLOAT_CHECK(
      rows <= kRows && origin.row <= kRows - rows && cols <= kCols && origin.col <= kCols - cols,
      "quantize: expected rows up to 2^32 and columns up to 2^36 under ", spec.str(),
      ", as its random bits repeat beyond; got rows [", origin.row, ", ", origin.row, " + ", rows,
      ") and columns [", origin.col, ", ", origin.col, " + ", cols, ") as read");
}

// Checks an operand whose rows lie apart.
void check_row_bytes(const TensorRef& x, const Operand& operand, bool columnwise) {
  const Spec& spec = operand.spec;
  MINIFLOAT_CHECK(!columnwise && x.batch == 1 && !x.groups && !operand.as_fp8 &&
                      spec.has_blocks() && !spec.has_blocks_2d(),
                  "quantize: expected row_bytes of one rowwise matrix with blocks of one row, got ",
                  spec.str());
  const std::int64_t least =
      std::max(spec.code_cols(x.cols), spec.scale_cols(x.cols) * spec.scale_bytes());
  MINIFLOAT_CHECK(operand.row_bytes >= least && operand.row_bytes % spec.scale_bytes() == 0,
                  "quantize: expected row_bytes of ", least, " or more, a multiple of ",
                  spec.scale_bytes(), ", got ", operand.row_bytes);
}

void check_operand(const TensorRef& x, const Operand& operand, bool columnwise) {
  const Spec& spec = operand.spec;
  const std::int64_t rows = columnwise ? x.cols : x.rows, cols = columnwise ? x.rows : x.cols;
  const bool is_padded = columnwise && x.groups;  // an empty group has codes
  const std::int64_t parts = x.groups ? x.groups.count : x.batch;
  const bool any = parts * rows * (is_padded ? cols + parts : cols) > 0;
  MINIFLOAT_CHECK(!spec.is_bf16(),
                  "quantize: bf16 is the identity and has no codes; expected a quantizing spec");
  MINIFLOAT_CHECK(operand.codes || operand.decoded || !any,
                  "quantize: expected a buffer for the codes of ", spec.str(),
                  " or for their values, got null");
  MINIFLOAT_CHECK(!operand.as_fp8 || spec.is_fp4_by_powers_of_two(),
                  "quantize: expected E2M1 under powers of two (mxfp4 or nvfp4+pow2) as FP8, got ",
                  spec.str());
  MINIFLOAT_CHECK(!operand.as_fp8 || !operand.decoded, "quantize: expected FP8 codes of ",
                  spec.str(), " or decoded values, got both");
  const auto place = reinterpret_cast<std::uintptr_t>(operand.decoded);
  MINIFLOAT_CHECK(place % 16 == 0,
                  "quantize: expected a buffer for decoded values at a multiple of 16 bytes, got ",
                  place % 16, " bytes past one");
  const bool any_scale = any || (operand.as_fp8 && parts * rows > 0);
  MINIFLOAT_CHECK(operand.scale || !any_scale, "quantize: expected a scale buffer for ", spec.str(),
                  ", got null");
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
  if (operand.row_bytes != 0) check_row_bytes(x, operand, columnwise);
  check_groups("quantize", x, spec, columnwise);
  check_origin(spec, operand.origin, (is_padded ? x.groups.count : x.batch) * rows, cols);
  if (operand.random.row_ids)
    MINIFLOAT_CHECK(x.groups && !columnwise,
                    "quantize: expected row ids of a rowwise operand with groups alone");
  if (spec.transform > 0)
    MINIFLOAT_CHECK(
        operand.origin.col % spec.transform == 0,
        "quantize: expected an origin along the contraction dimension that is a multiple of ",
        spec.transform, " under ", spec.str(), ", got ", operand.origin.col);
  if (!spec.stochastic) return;
  check_random("quantize", spec, operand.random);
  MINIFLOAT_CHECK(operand.origin.col % 16 == 0,
                  "quantize: expected an origin along the contraction dimension that is a multiple "
                  "of 16 under ",
                  spec.str(), ", got ", operand.origin.col);
}

// Returns whether any code of the operand is read.
bool has_elements(const Quantized& q) { return q.parts() * q.rows * q.cols > 0; }

void check_quantized(const char* function, const Quantized& q) {
  check_device(function, q.device);
  MINIFLOAT_CHECK(!q.spec.is_bf16(), function, ": bf16 is the identity and has no codes");
  check_sizes(function, q.batch, q.rows, q.cols);
  check_groups(function, q);
  MINIFLOAT_CHECK((q.codes && q.scale) || !has_elements(q), function,
                  ": expected codes and scale, got null");
}

void check_nvfp4_amax(const char* function, const Quantized& q) {
  MINIFLOAT_CHECK(q.spec.rule != ScaleRule::kNvfp4 || q.amax || q.parts() == 0, function, ": ",
                  q.spec.str(), " needs the tensor amax that its scales were made with, got null");
}

void check_offsets(const char* function, const ScaleMatrix& m) {
  check_sizes(function, m.batch, m.rows, m.cols);
  check_device(function, m.device);
  if (m.kind == ScaleGroups::kNone) return;
  MINIFLOAT_CHECK(m.batch == 1, function, ": expected one matrix with groups, got a batch of ",
                  m.batch);
  const std::int64_t length = m.kind == ScaleGroups::kAlongM ? m.rows : m.cols;
  if (m.device != Device::kCpu) return;  // offsets are not copied to the host
  std::int64_t begin = 0;
  for (std::int64_t g = 0; g < m.groups; ++g) {
    MINIFLOAT_CHECK(m.offsets[g] >= begin && m.offsets[g] <= length, function,
                    ": expected group ends that rise from 0 to ", length, ", got ", m.offsets[g],
                    " for group ", g, " after ", begin);
    begin = m.offsets[g];
  }
}

}  // namespace

void amax(const TensorRef& x, const AmaxOf& of, float* out, const Execution& execution) {
  const Spec& spec = of.spec;
  check_values("amax", x);
  MINIFLOAT_CHECK(spec.has_tensor_amax() || spec.has_row_amax(), "amax: ", spec.str(),
                  " has no tensor or row amax; expected tensor, row or nvfp4 scaling");
  check_groups("amax", x, spec, of.columnwise);
  if (spec.is_eden()) check_random("amax", spec, of.random);
  MINIFLOAT_ON(x.device, amax(x, of, out, execution));
}

void check_quantize(const TensorRef& x, const Operand* rowwise, const Operand* columnwise) {
  check_values("quantize", x);
  MINIFLOAT_CHECK(rowwise || columnwise,
                  "quantize: expected a rowwise or a columnwise operand, got neither");
  if (rowwise) check_operand(x, *rowwise, false);
  if (columnwise) check_operand(x, *columnwise, true);
}

void quantize(const TensorRef& x, const Operand* rowwise, const Operand* columnwise,
              const Execution& execution) {
  check_quantize(x, rowwise, columnwise);
  MINIFLOAT_ON(x.device, quantize(x, rowwise, columnwise, execution));
}

void dequantize(const Quantized& operand, DType dtype, void* out, const Execution& execution) {
  check_quantized("dequantize", operand);
  check_nvfp4_amax("dequantize", operand);
  if (!has_elements(operand)) return;
  MINIFLOAT_ON(operand.device, dequantize(operand, dtype, out, execution));
}

void decode_for_product(const Quantized& operand, std::uint16_t* out, const Execution& execution) {
  check_quantized("decode_for_product", operand);
  if (!has_elements(operand)) return;
  MINIFLOAT_ON(operand.device, decode_for_product(operand, out, execution));
}

void tensor_factor(const Quantized& operand, float* out, const Execution& execution) {
  check_device("tensor_factor", operand.device);
  check_nvfp4_amax("tensor_factor", operand);
  MINIFLOAT_ON(operand.device, tensor_factor(operand, out, execution));
}

void product_factor(const Quantized& a, const Quantized& b, float* out,
                    const Execution& execution) {
  check_device("product_factor", a.device);
  MINIFLOAT_CHECK(a.device == b.device, "product_factor: expected operands of one device, got two");
  MINIFLOAT_CHECK(a.parts() == 1 && b.parts() == 1,
                  "product_factor: expected matrices, got batches of ", a.parts(), " and ",
                  b.parts());
  check_nvfp4_amax("product_factor", a);
  check_nvfp4_amax("product_factor", b);
  MINIFLOAT_ON(a.device, product_factor(a, b, out, execution));
}

void fp4_as_fp8(std::span<const Fp4AsFp8Cast> operands, const Execution& execution) {
  if (operands.empty()) return;
  const Device device = operands.front().operand.device;
  for (const Fp4AsFp8Cast& o : operands) {
    const Quantized& operand = o.operand;
    check_quantized("fp4_as_fp8", operand);
    check_nvfp4_amax("fp4_as_fp8", operand);
    MINIFLOAT_CHECK(operand.spec.is_fp4_by_powers_of_two(),
                    "fp4_as_fp8: expected E2M1 under powers of two (mxfp4 or nvfp4+pow2), got ",
                    operand.spec.str());
    MINIFLOAT_CHECK(operand.device == device,
                    "fp4_as_fp8: expected operands of one device, got two");
  }
  MINIFLOAT_ON(device, fp4_as_fp8(operands, execution));
}

void hadamard(const TensorRef& x, int points, bool columnwise, std::uint32_t signs,
              std::uint16_t* out, const Execution& execution) {
  check_values("hadamard", x);
  MINIFLOAT_CHECK(points == 16 || points == 32 || points == 64 || points == 128,
                  "hadamard: expected 16, 32, 64 or 128 points, got ", points);
  check_groups("hadamard", x, columnwise ? points : 0);
  MINIFLOAT_ON(x.device, hadamard(x, points, columnwise, signs, out, execution));
}

std::int64_t ScaleMatrix::swizzled_bytes() const {
  if (kind == ScaleGroups::kAlongM) return swizzled_size_groups_m(rows, cols, groups);
  if (kind == ScaleGroups::kAlongK) return swizzled_size_groups_k(rows, cols, groups);
  return swizzled_size(rows, cols);
}

void swizzle_scales(const ScaleMatrix& shape, const std::uint8_t* scale, std::uint8_t* out,
                    const Execution& execution) {
  check_offsets("swizzle_scales", shape);
  if (shape.batch * shape.swizzled_bytes() == 0) return;
  MINIFLOAT_ON(shape.device, swizzle_scales(shape, scale, out, execution));
}

void unswizzle_scales(const ScaleMatrix& shape, const std::uint8_t* swizzled, std::uint8_t* out,
                      const Execution& execution) {
  check_offsets("unswizzle_scales", shape);
  if (shape.batch * shape.rows * shape.cols == 0) return;
  MINIFLOAT_ON(shape.device, unswizzle_scales(shape, swizzled, out, execution));
}

void transpose_nibbles(const CodeMatrix& codes, std::uint8_t* out, const Execution& execution) {
  check_device("transpose_nibbles", codes.device);
  check_sizes("transpose_nibbles", codes.batch, codes.rows, codes.cols);
  if (codes.batch * codes.rows * codes.cols == 0) return;
  MINIFLOAT_ON(codes.device, transpose_nibbles(codes, out, execution));
}

}  // namespace minifloat
