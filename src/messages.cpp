// minifloat/messages.h: layout, checks and the choice of the backend.
#include "minifloat/messages.h"

#include "cpu/messages.h"
#include "minifloat/core/block.h"
#include "minifloat/error.h"
#include "on_device.h"
#if defined(MINIFLOAT_WITH_CUDA)
#include "cuda/dequantize/messages.h"
#endif

namespace minifloat {

MessageLayout message_layout(const Spec& spec, std::int64_t cols) {
  if (spec.is_bf16()) return {2 * cols, 2 * cols};
  MINIFLOAT_CHECK(spec.has_blocks() && !spec.has_blocks_2d() && spec.rule != ScaleRule::kNvfp4,
                  "messages: expected bf16, or a spec whose scales are those of blocks of one row "
                  "alone (e4m3/1x128, mxfp8, mxfp4), got ",
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
  MINIFLOAT_CHECK(x.batch == 1 && !x.groups,
                  "quantize_messages: expected one matrix without groups, got a batch of ",
                  x.batch);
  if (x.cols == 0) return;  // any number of rows
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
  const MessageLayout layout = message_layout(m.spec, m.cols);
  MINIFLOAT_CHECK(m.ranks > 0 && m.cols >= 0 && is_addressable({m.ranks, layout.bytes}),
                  "sum_messages: expected one message or more, 2^48 bytes at most, got ", m.ranks,
                  " of ", m.cols, " values");
  if (m.cols == 0) return;
  MINIFLOAT_CHECK(m.data && out, "sum_messages: expected messages and a sum, got null");
  MINIFLOAT_ON(m.device, sum_messages(m, layout, dtype, out, execution));
}

}  // namespace minifloat
