// minifloat/messages.h: layout, checks and the choice of the backend.
#include "minifloat/messages.h"

#include "backends.h"
#include "memory_checks.h"
#include "minifloat/core/block.h"
#include "minifloat/error.h"
#include "on_device.h"
#include "quantize_checks.h"

namespace minifloat {

MessageLayout message_layout(const Spec& spec, std::int64_t cols) {
  check_spec("messages", spec);
  MINIFLOAT_CHECK(is_addressable({cols}), "messages: expected 0 to 2^48 values, got ", cols);
  if (spec.is_bf16()) return {2 * cols, 2 * cols};
  MINIFLOAT_CHECK(spec.has_blocks() && !spec.has_blocks_2d() && !spec.has_outer_amax(),
                  "messages: expected bf16, or a spec whose scales are those of blocks of one row "
                  "alone (e4m3/1x128, mxfp8, mxfp4, e1m2/1x32), got ",
                  spec.str());
  MINIFLOAT_CHECK(spec.transform == 0, "messages: expected a spec without a transform, got ",
                  spec.str());
  const std::int64_t scale_begin = round_up(spec.code_cols(cols), kMessageAlignment);
  const std::int64_t scales = spec.scale_cols(cols) * spec.scale_bytes();
  return {scale_begin, scale_begin + round_up(scales, kMessageAlignment)};
}

void quantize_messages(const TensorRef& x, const Spec& spec, const Random& random,
                       std::uint8_t* messages, const Execution& execution) {
  const MessageLayout layout = message_layout(spec, x.cols);
  Memory memory("quantize_messages");
  check_values("quantize_messages", x, memory);
  MINIFLOAT_CHECK(x.batch == 1 && !x.groups,
                  "quantize_messages: expected one matrix without groups, got a batch of ",
                  x.batch);
  if (x.cols == 0) return;  // any number of rows
  MINIFLOAT_CHECK(is_addressable({x.rows, layout.bytes}),
                  "quantize_messages: expected 2^48 bytes at most, got ", x.rows, " messages of ",
                  layout.bytes);
  memory.writes("messages", messages, x.rows * layout.bytes, spec.scale_bytes());
  memory.require_apart();
  if (x.rows == 0) return;
  Operand operand;
  operand.spec = spec;
  operand.random = random;
  operand.codes = messages;
  operand.scale = messages + layout.scale_begin;
  operand.row_bytes = layout.bytes;
  quantize(x, &operand, nullptr, execution);
}

void sum_messages(const Messages& m, DType dtype, void* out, const Execution& execution) {
  check_device("sum_messages", m.device);
  check_dtype("sum_messages", dtype);
  const MessageLayout layout = message_layout(m.spec, m.cols);
  MINIFLOAT_CHECK(m.ranks > 0 && m.cols >= 0 && is_addressable({m.ranks, layout.bytes}),
                  "sum_messages: expected one message or more, 2^48 bytes at most, got ", m.ranks,
                  " of ", m.cols, " values");
  if (m.cols == 0) return;
  Memory memory("sum_messages");
  memory.reads("messages", m.data, m.ranks * layout.bytes);
  memory.writes("the sum", out, m.cols * size_of(dtype), size_of(dtype));
  memory.require_apart();
  MINIFLOAT_ON(m.device, sum_messages(m, layout, dtype, out, execution));
}

}  // namespace minifloat
