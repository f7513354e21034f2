// The ops of a reduce-scatter of codes: message_bytes, quantize_messages and sum_messages. One
// all-to-all between them carries codes and scales.
#include "minifloat/messages.h"

#include <ATen/ATen.h>

#include "minifloat/core/shard.h"
#include "ops/bridge.h"
#include "ops/direct.h"
#include "ops/op.h"

namespace minifloat {
namespace {

using at::Tensor;
using c10::SymInt;

constexpr const char* kQuantizeMessages = "quantize_messages";
constexpr const char* kSumMessages = "sum_messages";

std::int64_t message_bytes(const std::string& spec, std::int64_t cols) {
  bridge::check_size("message_bytes", "cols", cols);
  return bridge::with_value_errors(
      [&] { return message_layout(bridge::parse_spec(spec), cols).bytes; });
}

// Writes zeros between the codes and the scales of all messages, and behind the scales: ranks send
// whole messages.
void clear_padding(const Tensor& messages, const Spec& spec, std::int64_t cols) {
  if (spec.is_bf16() || messages.numel() == 0) return;
  const MessageLayout layout = message_layout(spec, cols);
  const std::int64_t codes = spec.code_cols(cols);
  const std::int64_t end = layout.scale_begin + spec.scale_cols(cols) * spec.scale_bytes();
  for (const Span padding : {Span{codes, layout.scale_begin}, Span{end, layout.bytes}})
    if (!padding.empty()) messages.narrow(1, padding.begin, padding.size()).zero_();
}

void check_rows(const Tensor& x, const std::string& text, const std::optional<Tensor>& rng) {
  bridge::check_values(kQuantizeMessages, x);
  const Spec& spec = bridge::parse_spec(text);
  TORCH_CHECK_VALUE(x.dim() == 2, kQuantizeMessages, ": expected x (ranks, cols), got ", x.dim(),
                    " dimensions");
  TORCH_CHECK_VALUE(!spec.is_bf16(), kQuantizeMessages,
                    ": bf16 is the identity and has no codes; expected a quantizing spec");
  TORCH_CHECK_VALUE(!spec.stochastic || rng, kQuantizeMessages, ": ", spec.str(),
                    " rounds stochastically and needs rng, an int64 tensor (seed, count)");
  if (rng) bridge::check_rng(kQuantizeMessages, *rng, x);
}

Tensor quantize_messages_kernel(const Tensor& x, const std::string& text,
                                const std::optional<Tensor>& rng, std::int64_t stream) {
  check_rows(x, text, rng);
  const Spec& spec = bridge::parse_spec(text);
  const std::int64_t bytes = message_bytes(text, x.sym_size(1).guard_int(__FILE__, __LINE__));
  if (x.is_meta())
    return at::empty_symint({x.sym_size(0), SymInt(bytes)}, x.options().dtype(at::kByte));
  const TensorRef in = bridge::tensor_ref(kQuantizeMessages, x);
  Random random;
  Tensor state;
  if (rng) {
    bridge::check_memory(kQuantizeMessages, "rng", *rng);
    state = rng->contiguous();
    random = {state.const_data_ptr<std::int64_t>(), static_cast<int>(state.size(0)),
              static_cast<std::uint64_t>(stream)};
  }
  const Tensor messages = torch_ops::direct_empty(x, {x.size(0), bytes}, at::kByte);
  bridge::with_value_errors([&] {
    quantize_messages(in, spec, random, messages.mutable_data_ptr<std::uint8_t>(),
                      bridge::ExecutionOn(x));
  });
  clear_padding(messages, spec, x.size(1));
  return messages;
}

void sum_messages_kernel(const Tensor& messages, const std::string& spec, const Tensor& out) {
  TORCH_CHECK_VALUE(messages.scalar_type() == at::kByte && messages.dim() == 2, kSumMessages,
                    ": expected messages as uint8 (ranks, bytes), got ", messages.scalar_type(),
                    " ", messages.sym_sizes());
  bridge::check_value_dtype(kSumMessages, "out", out);
  TORCH_CHECK_VALUE(out.dim() == 1, kSumMessages, ": expected out (cols), got ", out.dim(),
                    " dimensions");
  bridge::check_one_device(kSumMessages, {{messages}, {out}});
  if (out.is_meta()) return;
  const std::int64_t cols = out.size(0), ranks = messages.size(0);
  bridge::check_sizes(kSumMessages, "messages", messages);
  bridge::check_bytes(kSumMessages, "messages", messages, ranks * message_bytes(spec, cols));
  bridge::check_bytes(kSumMessages, "out", out,
                      cols * static_cast<std::int64_t>(out.element_size()));
  bridge::with_value_errors([&] {
    sum_messages({.spec = bridge::parse_spec(spec),
                  .data = messages.const_data_ptr<std::uint8_t>(),
                  .ranks = ranks,
                  .cols = cols,
                  .device = bridge::backend_of(messages)},
                 out.scalar_type() == at::kFloat ? DType::kFloat32 : DType::kBFloat16,
                 out.mutable_data_ptr(), bridge::ExecutionOn(messages));
  });
}

const torch_ops::Op quantize_messages_op(kQuantizeMessages, quantize_messages_kernel,
                                         torch_ops::skipped());
const torch_ops::Op sum_messages_op(kSumMessages, sum_messages_kernel, torch_ops::skipped());

}  // namespace

TORCH_LIBRARY_IMPL(minifloat, CatchAll, m) { m.impl("message_bytes", message_bytes); }

}  // namespace minifloat
