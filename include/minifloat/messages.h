// Messages of a reduce-scatter of codes: what one rank sends to another, and their sum.
//
//     message     codes of `cols` values | padding | their block scales | padding
//
// Codes and scales begin at multiples of kMessageAlignment bytes of a message, and messages follow
// each other without gaps. Under bf16 a message is the values themselves, without padding.
#pragma once

#include <cstdint>

#include "minifloat/quantize.h"

namespace minifloat {

inline constexpr std::int64_t kMessageAlignment = 16;

// Where the scales of a message begin, and its size, in bytes.
struct MessageLayout {
  std::int64_t scale_begin, bytes;
};

// Returns the layout of a message of `cols` values. Throws Error for a spec whose scales are not
// those of blocks of one row alone, or that transforms values.
MessageLayout message_layout(const Spec& spec, std::int64_t cols);

// Quantizes each row of x to a message of its own, with the codes and scales that it has in x.
//   random: required by +sr   messages: (rows, bytes), of x's device
void quantize_messages(const TensorRef& x, const Spec& spec, const Random& random,
                       std::uint8_t* messages, const Execution& execution = {});

// Messages of one length under one spec, the first rank's first.
struct Messages {
  Spec spec;
  const std::uint8_t* data = nullptr;  // (ranks, bytes)
  std::int64_t ranks = 0;
  std::int64_t cols = 0;
  Device device = Device::kCpu;
};

// Adds the values of all messages in fp32, one rank after the other, and rounds the sum once:
// ((v_0 + v_1) + v_2) + ..., where v_r = fl32(code * scale). A NaN gives the one NaN.
//   out: (cols), in fp32 or bf16
void sum_messages(const Messages& messages, DType dtype, void* out,
                  const Execution& execution = {});

}  // namespace minifloat
