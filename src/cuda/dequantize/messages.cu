// The sum of messages: a thread adds up 16 columns of all ranks, in registers.
//
//     bytes an element: 1, 1/2 or 2 of each rank's codes, a block's scale, 2 or 4 of the sum
#include "cuda/dequantize/messages.h"

#include "cuda/codec/decode.cuh"
#include "cuda/common/launch.h"

namespace minifloat::cuda {
namespace {

struct SumArgs {
  Source values;  // of bf16 messages: (ranks, cols)
  const std::uint8_t* messages;
  std::int64_t ranks;
  MessageLayout layout;
  ScaleRule rule;
  int width_log2;  // of a block
  std::uint32_t cols;
  void* out;
  bool aligned_out;
};

struct Bf16Values {};  // the messages of the spec bf16

// Loads the values of 16 codes of rank r's message. Those past the last column are of no meaning.
template <class F>
__device__ __forceinline__ void load_values(const SumArgs& args, std::int64_t r, std::uint32_t col,
                                            float (&v)[kVec]) {
  if constexpr (std::is_same_v<F, Bf16Values>) {
    const auto* row = reinterpret_cast<const Bf16*>(args.messages + r * args.layout.bytes);
    const Vec16<Bf16> vec = load_vec(args.values, row, col);
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] = vec[i];
  } else {
    const std::uint8_t* const message = args.messages + r * args.layout.bytes;
    Codes<F> codes;
    if constexpr (F::kBits == 8) {
      const uint4 w = __ldg(reinterpret_cast<const uint4*>(message + col));
      codes.w[0] = w.x, codes.w[1] = w.y, codes.w[2] = w.z, codes.w[3] = w.w;
    } else {
      const uint2 w = __ldg(reinterpret_cast<const uint2*>(message + col / 2));
      codes.w[0] = w.x, codes.w[1] = w.y;
    }
    decode_vec<F>(codes, v);
    const std::uint8_t* const scales = message + args.layout.scale_begin;
    const std::uint32_t block = col >> args.width_log2;
    const float scale = args.rule == ScaleRule::kBlock
                            ? __ldg(reinterpret_cast<const float*>(scales) + block)
                            : decode_e8m0(__ldg(scales + block));
#pragma unroll
    for (float& value : v) value *= scale;
  }
}

template <class F, class Out>
__global__ void __launch_bounds__(kThreads) sum_in_order(const __grid_constant__ SumArgs args) {
  const std::uint32_t col = (blockIdx.x * kThreads + threadIdx.x) * kVec;
  if (col >= args.cols) return;
  float sum[kVec];
  load_values<F>(args, 0, col, sum);
#pragma unroll 4
  for (std::int64_t r = 1; r < args.ranks; ++r) {
    float v[kVec];
    load_values<F>(args, r, col, v);
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum[i] += v[i];
  }

  Vec16<Out> rounded = {};
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    if constexpr (sizeof(Out) == 2)
      rounded.set(i, static_cast<Bf16>(encode_bf16(sum[i])));
    else
      rounded.set(i, value_to_encode(sum[i], false));
  }
  Out* const out = static_cast<Out*>(args.out) + col;
  const bool whole = args.aligned_out && col + kVec <= args.cols;
#pragma unroll
  for (int i = 0; whole && i < static_cast<int>(sizeof rounded / sizeof(uint4)); ++i)
    reinterpret_cast<uint4*>(out)[i] = reinterpret_cast<const uint4*>(&rounded)[i];
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    if (!whole && col + i < args.cols) out[i] = reinterpret_cast<const Out*>(&rounded)[i];
}

template <class F>
void launch_sum(const SumArgs& args, DType dtype, cudaStream_t stream) {
  const unsigned grid = grid_of(ceil_div<std::int64_t>(args.cols, kThreads * kVec), "sum_messages");
  if (dtype == DType::kFloat32)
    sum_in_order<F, float><<<grid, kThreads, 0, stream>>>(args);
  else
    sum_in_order<F, Bf16><<<grid, kThreads, 0, stream>>>(args);
  check_launch("sum_messages");
}

}  // namespace

void sum_messages(const Messages& m, const MessageLayout& layout, DType dtype, void* out,
                  const Execution& execution) {
  const auto is_aligned = [](const void* p) {
    return reinterpret_cast<std::uintptr_t>(p) % kMessageAlignment == 0;
  };
  MINIFLOAT_CHECK(m.spec.is_bf16() || is_aligned(m.data),
                  "sum_messages: expected messages from a multiple of 16 bytes on");
  MINIFLOAT_CHECK(m.cols < std::int64_t{1} << 31,
                  "sum_messages: expected less than 2^31 columns, got ", m.cols);
  SumArgs args = {};
  args.values =
      source_of({.data = m.data, .dtype = DType::kBFloat16, .rows = m.ranks, .row_stride = m.cols});
  args.values.cols = m.cols;
  args.messages = m.data, args.ranks = m.ranks, args.layout = layout;
  args.rule = m.spec.rule;
  if (m.spec.has_blocks())
    args.width_log2 = __builtin_ctz(static_cast<unsigned>(m.spec.block_cols));
  args.cols = static_cast<std::uint32_t>(m.cols);
  args.out = out, args.aligned_out = is_aligned(out);
  const cudaStream_t stream = cuda_stream(execution);
  switch (m.spec.elements) {
    case Elements::kE4m3: return launch_sum<E4M3>(args, dtype, stream);
    case Elements::kE5m2: return launch_sum<E5M2>(args, dtype, stream);
    case Elements::kE2m1: return launch_sum<E2M1>(args, dtype, stream);
    case Elements::kBf16: return launch_sum<Bf16Values>(args, dtype, stream);
  }
}

}  // namespace minifloat::cuda
