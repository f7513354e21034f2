// The sum of messages: a thread adds up 16 columns of all ranks, in registers. It loads several
// ranks' parts before it adds the first: those of one rank, 8 or 16 bytes a thread, are too few to
// be in flight.
//
//     bytes an element: 1, 1/2 or 2 of each rank's codes, a block's scale, 2 or 4 of the sum
#include "backends.h"

#include <algorithm>

#include "cuda/codec/decode.cuh"
#include "cuda/common/launch.h"

namespace minifloat::cuda {
namespace {

struct SumArgs {
  KernelInput values;  // of bf16 messages: (ranks, cols)
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

// A rank's part of a thread's columns: 16 codes, and the scale of their block. What lies past the
// last column is of no meaning.
template <class F, ScaleRule Rule>
struct Part {
  static_assert(Rule == ScaleRule::kMx || (Rule == ScaleRule::kBlock && kDecodedShift<F> == 0));
  static constexpr int kAtOnce = F::kBits == 8 ? 4 : 8;  // ranks
  Codes<F> codes;
  std::uint32_t scale;  // the bits of a float, or an E8M0 code

  __device__ __forceinline__ void load(const SumArgs& args, std::int64_t r, std::uint32_t col) {
    const std::uint8_t* const message = args.messages + r * args.layout.bytes;
    if constexpr (F::kBits == 8) {
      const uint4 w = __ldg(reinterpret_cast<const uint4*>(message + col));
      codes.w[0] = w.x, codes.w[1] = w.y, codes.w[2] = w.z, codes.w[3] = w.w;
    } else {
      const uint2 w = __ldg(reinterpret_cast<const uint2*>(message + col / 2));
      codes.w[0] = w.x, codes.w[1] = w.y;
    }
    const std::uint8_t* const scales = message + args.layout.scale_begin;
    const std::uint32_t block = col >> args.width_log2;
    if constexpr (Rule == ScaleRule::kBlock)
      scale = __ldg(reinterpret_cast<const std::uint32_t*>(scales) + block);
    else
      scale = __ldg(scales + block);
  }

  // Returns whether the scale is a power of two under which no product with a code overflows or
  // underflows: then each is exact, and the rounding of the sum is the only one.
  __device__ __forceinline__ bool is_exact() const {
    constexpr int kLargest =  // the exponent of the largest code
        static_cast<int>(bit_cast<std::uint32_t>(F::kMax) >> Float32::kMantissaBits) -
        Float32::kBias;
    constexpr std::uint32_t kMost = E8M0::kMaxBits - std::max(kLargest, kDecodedShift<F>);
    if constexpr (Rule == ScaleRule::kMx) return scale <= kMost;
    const std::uint32_t exponent = scale >> Float32::kMantissaBits;
    return exponent - 1 < kMost && exponent << Float32::kMantissaBits == scale;
  }
  template <bool kExact>
  __device__ __forceinline__ void add_to(float (&sum)[kVec]) const {
    float v[kVec];
    decode_shifted<F>(codes, v);
    if constexpr (kExact) {
      float factor;
      if constexpr (Rule == ScaleRule::kBlock)
        factor = bit_cast<float>(scale);
      else if constexpr (kDecodedShift<F> > 0)
        factor = bit_cast<float>((scale + kDecodedShift<F>) << Float32::kMantissaBits);
      else
        factor = decode_e8m0(scale);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum[i] = fmaf(v[i], factor, sum[i]);
    } else {
      constexpr float kShift = 1 << kDecodedShift<F>;
      const float factor = Rule == ScaleRule::kBlock ? bit_cast<float>(scale) : decode_e8m0(scale);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum[i] += v[i] * kShift * factor;
    }
  }
};
template <ScaleRule Rule>
struct Part<Bf16Values, Rule> {
  static constexpr int kAtOnce = 4;
  Vec16<Bf16> vec;

  __device__ __forceinline__ void load(const SumArgs& args, std::int64_t r, std::uint32_t col) {
    const auto* row = reinterpret_cast<const Bf16*>(args.messages + r * args.layout.bytes);
    vec = load_vec(args.values, row, col);
  }
  __device__ __forceinline__ bool is_exact() const { return true; }
  template <bool kExact>
  __device__ __forceinline__ void add_to(float (&sum)[kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum[i] += vec[i];
  }
};

// Adds the parts of kRanks ranks from rank r on.
template <class P, int kRanks>
__device__ __forceinline__ void add_parts(const SumArgs& args, std::int64_t r, std::uint32_t col,
                                          float (&sum)[kVec]) {
  P parts[kRanks];
#pragma unroll
  for (int i = 0; i < kRanks; ++i) parts[i].load(args, r + i, col);
  bool is_exact = true;
#pragma unroll
  for (const P& part : parts) is_exact = is_exact && part.is_exact();
  if (is_exact) {
#pragma unroll
    for (const P& part : parts) part.template add_to<true>(sum);
  } else {
#pragma unroll
    for (const P& part : parts) part.template add_to<false>(sum);
  }
}

// The threads of a block: few, so that the processors end together. A thread takes all ranks.
constexpr int kSumThreads = 128;

template <class P, class Out>
__global__ void __launch_bounds__(kSumThreads, 8)
    sum_in_order(const __grid_constant__ SumArgs args) {
  constexpr int kAtOnce = P::kAtOnce;
  const std::uint32_t col = (blockIdx.x * kSumThreads + threadIdx.x) * kVec;
  if (col >= args.cols) return;
  float sum[kVec];
#pragma unroll
  for (float& s : sum) s = -0.0f;  // -0 + v is v, of either zero too
  std::int64_t r = 0;
#pragma unroll 1
  for (; r + kAtOnce <= args.ranks; r += kAtOnce) add_parts<P, kAtOnce>(args, r, col, sum);
#pragma unroll 1
  for (; r < args.ranks; ++r) add_parts<P, 1>(args, r, col, sum);

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

template <class P>
void launch_parts(const SumArgs& args, DType dtype, cudaStream_t stream) {
  const unsigned grid =
      grid_of(ceil_div<std::int64_t>(args.cols, kSumThreads * kVec), "sum_messages");
  if (dtype == DType::kFloat32)
    sum_in_order<P, float><<<grid, kSumThreads, 0, stream>>>(args);
  else
    sum_in_order<P, Bf16><<<grid, kSumThreads, 0, stream>>>(args);
  check_launch("sum_messages");
}
template <class F>
void launch_sum(const SumArgs& args, DType dtype, cudaStream_t stream) {
  if constexpr (std::is_same_v<F, E4M3>)  // other blocks have E8M0 scales alone
    if (args.rule == ScaleRule::kBlock)
      return launch_parts<Part<F, ScaleRule::kBlock>>(args, dtype, stream);
  launch_parts<Part<F, ScaleRule::kMx>>(args, dtype, stream);
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
  args.values = kernel_input(
      {.data = m.data, .dtype = DType::kBFloat16, .rows = m.ranks, .row_stride = m.cols});
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
    case Elements::kE1m2: return launch_sum<E1M2>(args, dtype, stream);
    case Elements::kBf16:
      return launch_parts<Part<Bf16Values, ScaleRule::kNone>>(args, dtype, stream);
  }
}

}  // namespace minifloat::cuda
