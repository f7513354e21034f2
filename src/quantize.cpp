// The functions of minifloat/quantize.h and transform.h: casts, their readers, amaxes, transforms.
// Each checks its arguments, then calls the backend of the device. Nothing is read or written
// before every check has passed.
#include <cstdint>

#include "backends.h"
#include "memory_checks.h"
#include "minifloat/core/swizzle.h"
#include "minifloat/error.h"
#include "on_device.h"
#include "quantize_checks.h"

namespace minifloat {
namespace {

// Returns the values of an operand.
std::int64_t value_count(const Quantized& q) {
  return q.batch * q.rows * q.spec.padded_cols(q.cols);
}

// Checks the sizes of a matrix of scales and of its groups.
void check_scale_sizes(const char* function, const ScaleMatrix& m) {
  check_sizes(function, m.batch, m.rows, m.cols);
  MINIFLOAT_CHECK(m.kind == ScaleGroups::kNone || m.kind == ScaleGroups::kAlongM ||
                      m.kind == ScaleGroups::kAlongK,
                  function, ": expected a kind of groups, got ", static_cast<int>(m.kind));
  if (m.kind == ScaleGroups::kNone) return;
  MINIFLOAT_CHECK(m.batch == 1, function, ": expected one matrix with groups, got a batch of ",
                  m.batch);
  // Each group is padded to whole tiles.
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  MINIFLOAT_CHECK(0 <= m.groups && m.groups < kMost, function,
                  ": expected 0 to 2^31 - 1 groups, got ", m.groups);
  check_sizes(function, m.groups, kSwizzleTileRows,
              m.kind == ScaleGroups::kAlongM ? m.cols + kSwizzleTileCols : 1);
  check_sizes(function, m.groups, kSwizzleTileCols,
              m.kind == ScaleGroups::kAlongK ? m.rows + kSwizzleTileRows : 1);
}

// Checks them and the groups' ends.
void check_scales(const char* function, const ScaleMatrix& m, Memory& memory) {
  check_device(function, m.device);
  check_scale_sizes(function, m);
  if (m.kind == ScaleGroups::kNone) return;
  memory.reads("the groups' ends", m.offsets, m.groups * 4, 4);
  if (m.device != Device::kCpu) return;  // offsets are not copied to the host
  const std::int64_t length = m.kind == ScaleGroups::kAlongM ? m.rows : m.cols;
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
  Memory memory("amax");
  check_spec("amax", spec);
  check_values("amax", x, memory);
  MINIFLOAT_CHECK(spec.has_tensor_amax() || spec.has_row_amax(), "amax: ", spec.str(),
                  " has no tensor or row amax; expected tensor, row or nvfp4 scaling");
  check_groups("amax", x, spec, of.columnwise);
  if (spec.is_eden()) check_random("amax", spec, of.random, memory);
  memory.writes("amaxes", out, amaxes_of(x, spec, of.columnwise) * 4, 4);
  memory.require_apart();
  MINIFLOAT_ON(x.device, amax(x, of, out, execution));
}

void quantize(const TensorRef& x, const Operand* rowwise, const Operand* columnwise,
              const Execution& execution) {
  Memory memory("quantize");
  check_values("quantize", x, memory);
  check_operands(x, rowwise, columnwise, memory);
  memory.require_apart();
  MINIFLOAT_ON(x.device, quantize(x, rowwise, columnwise, execution));
}

void dequantize(const Quantized& operand, DType dtype, void* out, const Execution& execution) {
  Memory memory("dequantize");
  check_dtype("dequantize", dtype);
  check_tensor_factor("dequantize", operand, memory);
  check_quantized("dequantize", operand, memory);
  if (!has_elements(operand)) return;
  memory.writes("values", out, value_count(operand) * size_of(dtype), size_of(dtype));
  memory.require_apart();
  MINIFLOAT_ON(operand.device, dequantize(operand, dtype, out, execution));
}

void decode_for_product(const Quantized& operand, std::uint16_t* out, const Execution& execution) {
  Memory memory("decode_for_product");
  check_quantized("decode_for_product", operand, memory);
  MINIFLOAT_CHECK(!operand.spec.has_fp32_values(),
                  "decode_for_product: expected values that bf16 holds, got those of ",
                  operand.spec.str(), ", which are fp32");
  if (!has_elements(operand)) return;
  memory.writes("values", out, value_count(operand) * 2, 2);
  memory.require_apart();
  MINIFLOAT_ON(operand.device, decode_for_product(operand, out, execution));
}

void tensor_factor(const Quantized& operand, float* out, const Execution& execution) {
  Memory memory("tensor_factor");
  check_tensor_factor("tensor_factor", operand, memory);
  memory.writes("factors", out, operand.factors() * 4, 4);
  memory.require_apart();
  MINIFLOAT_ON(operand.device, tensor_factor(operand, out, execution));
}

void product_factor(const Quantized& a, const Quantized& b, float* out,
                    const Execution& execution) {
  Memory memory("product_factor");
  check_device("product_factor", a.device);
  MINIFLOAT_CHECK(a.device == b.device, "product_factor: expected operands of one device, got two");
  MINIFLOAT_CHECK(a.factors() == 1 && b.factors() == 1,
                  "product_factor: expected operands of one factor each, got ", a.factors(),
                  " and ", b.factors());
  check_tensor_factor("product_factor", a, memory);
  check_tensor_factor("product_factor", b, memory);
  memory.writes("factors", out, 2 * 4, 4);
  memory.require_apart();
  MINIFLOAT_ON(a.device, product_factor(a, b, out, execution));
}

void fp4_as_fp8(std::span<const Fp4AsFp8Cast> operands, const Execution& execution) {
  if (operands.empty()) return;
  const Device device = operands.front().operand.device;
  Memory memory("fp4_as_fp8");
  for (const Fp4AsFp8Cast& o : operands) {
    const Quantized& q = o.operand;
    check_spec("fp4_as_fp8", q.spec);
    MINIFLOAT_CHECK(q.spec.is_fp4_by_powers_of_two(),
                    "fp4_as_fp8: expected 4-bit codes under powers of two (mxfp4, nvfp4+pow2, "
                    "e1m2/1x32 or e1m2/1x16+pow2), got ",
                    q.spec.str());
    check_tensor_factor("fp4_as_fp8", q, memory);
    check_quantized("fp4_as_fp8", q, memory);
    MINIFLOAT_CHECK(q.device == device, "fp4_as_fp8: expected operands of one device, got two");
    memory.writes("codes", o.codes, value_count(q));
    memory.writes("row scales", o.row_scale, (q.groups.unit > 0 ? q.parts() : q.batch) * q.rows * 4,
                  4);
  }
  memory.require_apart();
  MINIFLOAT_ON(device, fp4_as_fp8(operands, execution));
}

void hadamard(const TensorRef& x, int points, bool columnwise, std::uint32_t signs,
              std::uint16_t* out, const Execution& execution) {
  Memory memory("hadamard");
  check_values("hadamard", x, memory);
  MINIFLOAT_CHECK(points == 16 || points == 32 || points == 64 || points == 128,
                  "hadamard: expected 16, 32, 64 or 128 points, got ", points);
  MINIFLOAT_CHECK(signs <= 0xFFFF, "hadamard: expected 16 bits of signs, got ", signs);
  check_groups("hadamard", x, columnwise ? points : 0);
  const std::int64_t cols = !columnwise ? x.cols
                            : x.groups
                                ? grouped_cols<std::int64_t>(x.rows, x.groups.unit, x.groups.count)
                                : x.rows;
  memory.writes("values", out,
                2 * x.batch * (columnwise ? x.cols : x.rows) * round_up<std::int64_t>(cols, points),
                2);
  memory.require_apart();
  MINIFLOAT_ON(x.device, hadamard(x, points, columnwise, signs, out, execution));
}

std::int64_t ScaleMatrix::swizzled_bytes() const {
  check_scale_sizes("swizzled_bytes", *this);
  if (kind == ScaleGroups::kAlongM) return swizzled_size_groups_m(rows, cols, groups);
  if (kind == ScaleGroups::kAlongK) return swizzled_size_groups_k(rows, cols, groups);
  return swizzled_size(rows, cols);
}

void swizzle_scales(const ScaleMatrix& shape, const std::uint8_t* scale, std::uint8_t* out,
                    const Execution& execution) {
  Memory memory("swizzle_scales");
  check_scales("swizzle_scales", shape, memory);
  const std::int64_t bytes = shape.batch * shape.swizzled_bytes();
  if (bytes == 0) return;
  memory.reads("scales", scale, shape.batch * shape.rows * shape.cols);
  memory.writes("swizzled scales", out, bytes);
  memory.require_apart();
  MINIFLOAT_ON(shape.device, swizzle_scales(shape, scale, out, execution));
}

void unswizzle_scales(const ScaleMatrix& shape, const std::uint8_t* swizzled, std::uint8_t* out,
                      const Execution& execution) {
  Memory memory("unswizzle_scales");
  check_scales("unswizzle_scales", shape, memory);
  const std::int64_t bytes = shape.batch * shape.rows * shape.cols;
  if (bytes == 0) return;
  memory.reads("swizzled scales", swizzled, shape.batch * shape.swizzled_bytes());
  memory.writes("scales", out, bytes);
  memory.require_apart();
  MINIFLOAT_ON(shape.device, unswizzle_scales(shape, swizzled, out, execution));
}

void transpose_nibbles(const CodeMatrix& codes, std::uint8_t* out, const Execution& execution) {
  Memory memory("transpose_nibbles");
  check_device("transpose_nibbles", codes.device);
  check_sizes("transpose_nibbles", codes.batch, codes.rows, codes.cols);
  if (codes.batch * codes.rows * codes.cols == 0) return;
  memory.reads("codes", codes.codes,
               codes.batch * codes.rows * ceil_div<std::int64_t>(codes.cols, 2));
  memory.writes("transposed codes", out,
                codes.batch * codes.cols * ceil_div<std::int64_t>(codes.rows, 2));
  memory.require_apart();
  MINIFLOAT_ON(codes.device, transpose_nibbles(codes, out, execution));
}

}  // namespace minifloat
