// The common parts of preset kernels. Rule, rounding and block are fixed at compile time. Inputs
// are whole vec16s or whole tiles, of bf16, in some kernels of fp32. Only tiles of groups have
// edges.
#pragma once

#include "cuda/codec/fp4_as_fp8.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/quantize/general.cuh"

namespace minifloat::cuda {

template <ScaleRule Rule, class Format, bool Stochastically, bool Transformed, bool Block2d = false,
          ScaleRounding Rounding = ScaleRounding::kDefault>
struct PresetCast : Cast<Format, reads_values(Rounding)> {
  static constexpr bool kStochastic = Stochastically, kTransform = Transformed;
  static constexpr ScaleRule kRule = Rule;
  static constexpr ScaleRounding kRounding = Rounding;
  static constexpr bool kIsEden = Rounding == ScaleRounding::kEden;
  static constexpr bool kDraws = kStochastic || kIsEden;  // random bits
  static constexpr bool kBlocks = Rule != ScaleRule::kTensor && Rule != ScaleRule::kRow;
  static constexpr bool kIsBlock2d = Block2d;
  // Whether scales may be stored swizzled.
  static constexpr bool kMaySwizzle = Rule == ScaleRule::kNvfp4 || Rule == ScaleRule::kMx;
  // The log2 of a block's row, in vec16s, and of its height.
  static constexpr int kVecsLog2 = Rule == ScaleRule::kNvfp4 ? 0 : Rule == ScaleRule::kMx ? 1 : 3;
  static constexpr int kHeightLog2 = Block2d ? kVecsLog2 + 4 : 0;
  static_assert(!Block2d || kBlocks);
  static constexpr bool kAsFp8 = false;  // whether FP4 is written as FP8
  static constexpr int kCodeBytes = kVecBytes<Format>;
};
// A cast to NVFP4 under powers of two that writes E4M3 codes under one scale a row
// (core/fp4_as_fp8.h), of one matrix.
template <class C>
struct AsFp8 : C {
  static_assert(C::kRule == ScaleRule::kNvfp4 && C::kRounding == ScaleRounding::kPowerOfTwo &&
                C::kHeightLog2 == 0);
  static constexpr bool kAsFp8 = true;
  static constexpr int kCodeBytes = kVec;
};

template <class C>
bool is_of(const Spec& spec) {
  return is_cast<C>(spec) && spec.stochastic == C::kStochastic &&
         (spec.transform > 0) == C::kTransform && spec.rule == C::kRule &&
         spec.scale_rounding == C::kRounding &&
         (spec.has_blocks() && spec.block_rows > 1) == C::kIsBlock2d;
}

// Returns whether a kernel that may leave out the rowwise cast is to make it.
__device__ __forceinline__ bool is_wanted(const KernelOperand& plan) { return plan.padded > 0; }

// ---- Values of a matrix -------------------------------------------------------------------------
// The values that hold for a whole matrix or group. One thread computes them, in shared memory,
// while the block waits for its elements. Values that take only a division or two are computed by
// every thread.
struct Whole {
  MatrixScale scale;
  std::uint32_t keys[2 * kPhiloxRounds];
  std::uint32_t stream[2], row, group;  // of random bits; under +eden a group is 128 columns
  HadamardSigns signs;                  // of +eden
};
template <class C>
constexpr bool kIsShared = C::kDraws || C::kRule == ScaleRule::kNvfp4;

// Computes the values.   part: the matrix or group; is_first: its scale and amax are stored
template <class C>
__device__ __forceinline__ void prepare(const KernelOperand& plan, Whole& whole, std::uint32_t part,
                                        bool is_first) {
  if constexpr (kIsShared<C>)
    whole.scale = matrix_scale<typename C::F>(plan, C::kRule, C::kRounding, part);
  if constexpr (C::kDraws) {
    const RandomKey random = random_key(plan);
    if constexpr (C::kIsEden) whole.signs = eden_signs(random);
    std::uint32_t k0 = static_cast<std::uint32_t>(random.key),
                  k1 = static_cast<std::uint32_t>(random.key >> 32);
    for (int i = 0; i < kPhiloxRounds; ++i) {
      whole.keys[2 * i] = k0, whole.keys[2 * i + 1] = k1;
      k0 += kPhiloxKeyStep0, k1 += kPhiloxKeyStep1;
    }
    whole.stream[0] = static_cast<std::uint32_t>(random.stream);
    whole.stream[1] = static_cast<std::uint32_t>(random.stream >> 32);
    whole.row = static_cast<std::uint32_t>(plan.origin_row);
    whole.group = static_cast<std::uint32_t>(plan.origin_col / (C::kIsEden ? kEdenPoints : kVec));
  }
  if (is_first && C::kRule != ScaleRule::kRow && plan.amax)
    store_whole<typename C::F>(plan, part, plan.amax[part]);
}
template <class C>
__device__ __forceinline__ MatrixScale scale_of_whole(const KernelOperand& plan, const Whole& whole,
                                                      std::uint32_t part) {
  if constexpr (kIsShared<C>) return whole.scale;
  return matrix_scale<typename C::F>(plan, C::kRule, C::kRounding, part);
}
// Returns the row of the random counter, less the origin that random_bits_at adds.
template <bool kHasIds>
__device__ __forceinline__ std::uint32_t counter_row(const KernelOperand& plan, const Whole& whole,
                                                     std::uint32_t row) {
  if constexpr (kHasIds)
    if (plan.row_ids) return static_cast<std::uint32_t>(__ldg(plan.row_ids + row)) - whole.row;
  return row;
}

// Returns core/philox.h's random_bits_at, from the keys of all rounds.
__device__ __forceinline__ RandomBits random_bits_at(const Whole& whole, std::uint32_t row,
                                                     std::uint32_t group) {
  RandomBits c = {{whole.group + group, whole.row + row, whole.stream[0], whole.stream[1]}};
#pragma unroll
  for (int i = 0; i < kPhiloxRounds; ++i)
    c = philox_round(c, whole.keys[2 * i], whole.keys[2 * i + 1]);
  return c;
}

// Stores the outputs of all matrices or groups: their scales, where no block has one, and amaxes.
template <class C>
__device__ __forceinline__ void store_parts(const KernelOperand& plan, std::uint32_t parts) {
  if constexpr (C::kRule != ScaleRule::kRow)
    for (std::uint32_t e = blockIdx.x * kThreads + threadIdx.x; plan.amax && e < parts;
         e += gridDim.x * kThreads)
      store_whole<typename C::F>(plan, e, plan.amax[e]);
}

// Whether a cast that scales by an amax of earlier steps can compute the current amax as it reads
// x.
template <class C>
constexpr bool kFindsCurrentAmax = C::kRule == ScaleRule::kTensor;
template <>
constexpr bool kFindsCurrentAmax<Absent> = false;

// Raises the current amax of a matrix or group at the end, by all threads of the block.   m: of the
// thread's values
__device__ __forceinline__ void raise_current_amax(const KernelOperand& plan, std::uint32_t part,
                                                   std::uint32_t m) {
  if (!plan.current_amax) return;
  __syncthreads();  // the other direction's amax is complete
  const std::uint64_t entry = std::uint64_t{part} * plan.amax_stride;
  raise_by_block(plan.current_amax + entry, m, plan.same_amax ? plan.same_amax + entry : nullptr);
}
// Raises it at once, by one thread.
__device__ __forceinline__ void raise_current_amax_of_vec(const KernelOperand& plan,
                                                          std::uint32_t part, std::uint32_t m) {
  raise_bits(plan.current_amax + std::uint64_t{part} * plan.amax_stride, m);
}

// ---- A vec16 ------------------------------------------------------------------------------------
// The values to cast, their amax, and a further factor of each element.
template <class T>
struct TransformedVec {
  Vec16<T> vec;
  std::uint32_t amax;
  float transform_factor;
};
using Transformed16 = TransformedVec<Bf16>;
template <class C>
__device__ __forceinline__ TransformedVec<float> transform_preset(const Vec16<float>& x)
  requires(!C::kTransform)
{
  return {x, C::kBlocks ? x.amax() : 0, 1.0f};
}
template <class C, class Elements>
__device__ __forceinline__ Transformed16 transform_preset(const Elements& x) {
  if constexpr (C::kTransform) {
    // The transform's 1/4 commutes with rounding to bf16, except at the ends of the range.
    // Elsewhere the factor of the cast contains it.
    constexpr std::uint32_t kLow = bit_cast<std::uint32_t>(0x1p-90f),
                            kHigh = bit_cast<std::uint32_t>(0x1p120f);
    static_assert(hadamard_norm(kVec) == 0.25f);
    float v[kVec];
    hadamard_sums(x, kVec, kHadamardSigns, v);
    Transformed16 t = {round_vec(v, 1.0f), 0, 0.25f};
    t.amax = t.vec.amax();
    if (t.amax - kLow < kHigh - kLow) {
      t.amax -= 2u << Float32::kMantissaBits;
    } else {
      t.vec = round_vec(v, 0.25f);
      t.amax = t.vec.amax();
      t.transform_factor = 1.0f;
    }
    return t;
  } else {
    Transformed16 t = {x, 0, 1.0f};
    if constexpr (C::kBlocks) t.amax = t.vec.amax();
    return t;
  }
}

// Returns 2^(T - K) of a row that is written as FP8, from its amax: a block's scale rises with its
// amax.
template <class C>
__device__ __forceinline__ float fp8_row_factor(const KernelOperand& plan, const MatrixScale& scale,
                                                std::uint32_t row) {
  if constexpr (C::kAsFp8) {
    const std::uint32_t amax = __ldg(plan.row_amax + row);
    using F = typename C::F;
    const float largest = block_scale<F>(C::kRule, C::kRounding, scale, amax).scale;
    const int exponent = fp4_row_exponent<F>(fp4_exponent_of_value(largest));  // -9 to 8
    return bit_cast<float>(static_cast<std::uint32_t>(Float32::kBias + kFp4AsFp8Top<F> - exponent)
                           << Float32::kMantissaBits);
  } else {
    return 1.0f;
  }
}
// Stores the scale of that row, 2^(K - T) times the tensor's.   factor: 2^(T - K)
__device__ __forceinline__ void store_fp8_row_scale(const KernelOperand& plan,
                                                    const MatrixScale& scale, std::uint32_t row,
                                                    float factor) {
  constexpr std::uint32_t kOneSquared = 2u * Float32::kBias << Float32::kMantissaBits;
  plan.row_scale[row] =
      bit_cast<float>(kOneSquared - bit_cast<std::uint32_t>(factor)) * scale.scale;
}

// Stores a vec16's codes, and their values where these are written.   at: its index among all
// vec16s
template <class F>
__device__ __forceinline__ void store_encoded(const KernelOperand& plan, const Codes<F>& codes,
                                              const BlockScale& block, std::uint8_t* to,
                                              std::uint64_t at) {
  if (plan.codes) store_vec<F>(to, 0, codes);
  if (plan.decoded)
    store_product_values<F>(codes, block.scale, plan.decoded + at * kVec, 0, kVec, true);
}
// Encodes and stores a vec16.   to: its codes; at: its index among all vec16s; row_factor: of a row
// that is written as FP8
template <class C, class T>
__device__ __forceinline__ void encode_and_store(const KernelOperand& plan,
                                                 const TransformedVec<T>& transformed,
                                                 const BlockScale& block, const RandomBits& bits,
                                                 std::uint8_t* to, std::uint64_t at,
                                                 [[maybe_unused]] float row_factor = 1.0f) {
  const Codes<typename C::F> codes = encode_in_block<typename C::F, C::kStochastic>(
      plan, C::kRule, transformed.vec, block, bits, transformed.transform_factor);
  if constexpr (C::kAsFp8) {
    // Under a NaN scale the codes are the largest without signs, and it times NaN is NaN.
    *reinterpret_cast<uint4*>(to) =
        fp8_codes(fp8_code_table<typename C::F>(block.scale * row_factor), codes.w[0], codes.w[1]);
    return;
  }
  store_encoded(plan, codes, block, to, at);
}

}  // namespace minifloat::cuda
