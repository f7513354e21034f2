// The sum of messages, a piece of columns at a time: its sums stay in cache while all ranks' codes
// pass by.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "backends.h"
#include "minifloat/core/block.h"
#include "minifloat/core/rounding.h"
#include "minifloat/core/scaling.h"
#include "parallel.h"
#include "targets.h"
#include "with_format.h"

namespace minifloat::cpu {
namespace {

constexpr std::int64_t kPiece = 2048;  // columns: whole blocks, whole bytes

struct PieceArgs {
  const Messages* messages;
  MessageLayout layout;
  std::int64_t begin, count;  // columns
  float* sum;                 // (count)
};

struct Bf16Values {};  // the messages of the spec bf16

template <class F>
struct SumPiece {
  MINIFLOAT_INLINE static float value(const std::uint8_t* codes, std::int64_t c) {
    if constexpr (std::is_same_v<F, Bf16Values>)
      return decode_bf16(codes[2 * c] | static_cast<std::uint32_t>(codes[2 * c + 1]) << 8);
    else if constexpr (F::kBits == 4)
      return decode<F>(static_cast<std::uint32_t>(codes[c / 2] >> (c % 2 * 4)) & 0xFu);
    else
      return decode<F>(codes[c]);
  }

  MINIFLOAT_INLINE static float scale(const Spec& spec, const std::uint8_t* scales,
                                      std::int64_t block) {
    if (spec.rule == ScaleRule::kBlock) {
      float scale;  // of any address
      std::memcpy(&scale, scales + block * static_cast<std::int64_t>(sizeof scale), sizeof scale);
      return scale;
    }
    return spec.rule == ScaleRule::kMx ? decode_e8m0(scales[block]) : 1.0f;
  }

  MINIFLOAT_INLINE static void run(const PieceArgs& args) {
    const Messages& m = *args.messages;
    const std::int64_t width = m.spec.has_blocks() ? m.spec.block_cols : kPiece;
    for (std::int64_t r = 0; r < m.ranks; ++r) {
      const std::uint8_t* message = m.data + r * args.layout.bytes;
      for (std::int64_t c = 0; c < args.count; c += width) {
        const std::int64_t col = args.begin + c, end = std::min(width, args.count - c);
        const float s = scale(m.spec, message + args.layout.scale_begin, col / width);
        float* const sum = args.sum + c;
        if (r == 0)
          for (std::int64_t i = 0; i < end; ++i) sum[i] = value(message, col + i) * s;
        else
          for (std::int64_t i = 0; i < end; ++i) sum[i] += value(message, col + i) * s;
      }
    }
  }
};

void sum_piece(const PieceArgs& args) {
  const Spec& spec = args.messages->spec;
  if (spec.is_bf16()) return run_widest<SumPiece<Bf16Values>>(args);
  with_format(spec.elements, [&]<class F>(F) { run_widest<SumPiece<F>>(args); });
}

}  // namespace

void sum_messages(const Messages& messages, const MessageLayout& layout, DType dtype, void* out,
                  const Execution& execution) {
  const std::int64_t cols = messages.cols;
  parallel_for(execution, ceil_div(cols, kPiece), messages.ranks * cols, [&](std::int64_t piece) {
    float sum[kPiece];
    const std::int64_t begin = piece * kPiece, count = std::min(kPiece, cols - begin);
    sum_piece({&messages, layout, begin, count, sum});
    for (std::int64_t i = 0; i < count; ++i) {
      if (dtype == DType::kFloat32)
        static_cast<float*>(out)[begin + i] = value_to_encode(sum[i], false);
      else
        static_cast<std::uint16_t*>(out)[begin + i] =
            static_cast<std::uint16_t>(encode_bf16(sum[i]));
    }
  });
}

}  // namespace minifloat::cpu
