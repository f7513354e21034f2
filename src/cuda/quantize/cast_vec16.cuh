// The cast of one vec16 in one direction, in registers:
//
//     1  transform           16 points in a thread, more across lanes
//     2  amax of the block    the vec16's, and shuffles along a row; of a 2D block: an argument
//     3  scale and factor    core/scale_rule.h
//     4  encode, store
#pragma once

#include <cstdint>

#include "cuda/codec/block_error.cuh"
#include "cuda/codec/decode.cuh"
#include "cuda/codec/eden.cuh"
#include "cuda/codec/encode.cuh"
#include "cuda/codec/scale.cuh"
#include "cuda/common/groups.cuh"
#include "cuda/common/tile.cuh"
#include "minifloat/core/swizzle.h"
#include "minifloat/quantize.h"

namespace minifloat::cuda {

// A direction as its kernel is compiled. Rules, block shapes, the transform and the rounding of
// codes are chosen at run time, once a vec16.
template <class Format, bool ByValues = false>
struct Cast {
  using F = Format;
  static constexpr bool kReadsValues = ByValues;  // the scale rule does
};
struct Absent {};  // the direction is not cast

// A direction as the device reads it. Sizes are those of the operand as read.
struct KernelOperand {
  ScaleRule rule;
  ScaleRounding rounding;
  bool delayed;
  bool aligned;     // rows of codes start at multiples of a vec16's bytes
  bool has_gaps;    // rows of codes, and of scales, lie apart: code_pitch and scale_cols
  bool swizzled;    // scales are stored as core/swizzle.h lays them out
  bool stochastic;  // codes are
  int points;       // of the transform; 0: there is none
  int height_log2;  // of a block; 0 for tensors and rows
  int vecs_log2;    // of a block's row; 3: a whole tile row
  std::uint32_t rows, padded, code_pitch, scale_rows, scale_cols;
  const float* amax;            // active: (batch), or (batch, rows); of groups: (groups), or
                                // columnwise (groups, rows)
  const float* reported;        // the values for amax_out, if not the active ones
  float* amax_out;              // null: not written
  std::uint32_t* current_amax;  // raised by the cast itself; null: not
  std::uint32_t* same_amax;     // the other direction's, raised with it; null: none
  std::uint32_t amax_stride;    // between the current amaxes of two parts
  bool has_history;             // current amaxes are in a history, which no cast clears
  const std::int64_t* random;
  int random_size;
  std::uint64_t stream;
  const std::int32_t* row_ids;  // the rows of the random counter; null: their positions
  std::int64_t origin_row, origin_col;
  std::uint8_t* codes;
  void* scale;
  std::uint16_t* decoded;  // null: not written
  // Of FP4 written as FP8: the amax of each row of blocks, and the scales of rows; null: the codes
  // are FP4.
  const std::uint32_t* row_amax;
  float* row_scale;
};

template <class F>
__device__ __forceinline__ MatrixScale matrix_scale(const KernelOperand& plan, ScaleRule rule,
                                                    ScaleRounding rounding, std::uint32_t batch) {
  if (outer_scale(rule) != OuterScale::kTensor) return {};
  return matrix_scale_of<F>(rule, rounding, magnitude_bits(plan.amax[batch]));
}

__device__ __forceinline__ RandomKey random_key(const KernelOperand& plan) {
  return minifloat::random_key(plan.random, plan.random_size, plan.stream);
}

// Returns the row of the random counter.
__device__ __forceinline__ std::uint32_t random_row(const KernelOperand& plan, std::uint32_t row) {
  return plan.row_ids ? static_cast<std::uint32_t>(__ldg(plan.row_ids + row))
                      : static_cast<std::uint32_t>(plan.origin_row + row);
}

// Encodes a vec16.   transform_factor: a further factor of the elements, a power of two
template <class F, bool kStochastic, class T>
__device__ __forceinline__ Codes<F> encode_in_block(const KernelOperand& plan, ScaleRule rule,
                                                    const Vec16<T>& vec, const BlockScale& block,
                                                    const RandomBits& bits,
                                                    float transform_factor = 1.0f) {
  const bool delayed = rule == ScaleRule::kTensor && plan.delayed;
  return encode_vec<F, kStochastic>(
      vec,
      {block.encode * transform_factor, has_zero_codes(rule, block.code), delayed,
       block.takes_fast_path},
      bits);
}

// The bytes of a vec16's codes.
template <class F>
inline constexpr int kVecBytes = kVec * F::kBits / 8;

// ---- Stores -------------------------------------------------------------------------------------
// Stores all codes of a vec16, as vec16 i of `to`, which starts at a multiple of a vec16's bytes.
template <class F>
__device__ __forceinline__ void store_vec(std::uint8_t* to, std::uint64_t i,
                                          const Codes<F>& codes) {
  if constexpr (F::kBits == 8)
    reinterpret_cast<uint4*>(to)[i] = make_uint4(codes.w[0], codes.w[1], codes.w[2], codes.w[3]);
  else
    reinterpret_cast<uint2*>(to)[i] = make_uint2(codes.w[0], codes.w[1]);
}
template <class F>
__device__ __forceinline__ void store_codes(const KernelOperand& plan, const Window& window,
                                            const Codes<F>& codes, const Place& at) {
  if (!plan.codes) return;
  const std::uint32_t col = window.first_col + at.col;
  std::uint8_t* to =
      plan.codes + std::uint64_t{at.line} * plan.code_pitch + (F::kBits == 8 ? col : col / 2);
  const int left = static_cast<int>(min(window.cols - at.col, std::uint32_t{kVec}));  // elements
  if (left == kVec && plan.aligned) return store_vec<F>(to, 0, codes);
  Codes<F> rest = codes;
#pragma unroll 1
  for (int i = 0; i < left; i += 8 / F::kBits, ++to) {
    std::uint32_t byte = rest[0];
    rest.pop();
    if constexpr (F::kBits == 4) {
      if (i + 1 < left) byte |= rest[0] << 4;
      rest.pop();
    }
    *to = static_cast<std::uint8_t>(byte);
  }
}

// Returns the index of a swizzled scale. Where matrices have whole tiles of rows, those of a batch
// lie as the rows of one.   col, cols: of blocks
__device__ __forceinline__ std::uint64_t swizzled_index(std::uint32_t row, std::uint32_t col,
                                                        std::uint32_t cols) {
  return static_cast<std::uint64_t>(swizzled_offset(row, col, cols));
}

// Stores the scale of block i of the operand.
__device__ __forceinline__ void store_scale_at(const KernelOperand& plan, ScaleRule rule,
                                               const BlockScale& block, std::uint64_t i) {
  if (rule == ScaleRule::kBlock)
    static_cast<float*>(plan.scale)[i] = block.scale;
  else
    static_cast<std::uint8_t*>(plan.scale)[i] = static_cast<std::uint8_t>(block.code);
}
__device__ __forceinline__ void store_scale(const KernelOperand& plan, const Window& window,
                                            const BlockScale& block, const Place& at) {
  const std::uint32_t col = (window.first_col + at.col) / kVec;
  if ((col & ((1u << plan.vecs_log2) - 1)) != 0) return;
  if (plan.swizzled) {
    const auto of_matrix = static_cast<std::uint64_t>(swizzled_size(plan.rows, plan.scale_cols));
    return store_scale_at(
        plan, plan.rule, block,
        at.batch * of_matrix + swizzled_index(at.row, col >> plan.vecs_log2, plan.scale_cols));
  }
  if ((at.row & ((1u << plan.height_log2) - 1)) != 0) return;
  const std::uint64_t row = plan.height_log2 == 0 ? at.line
                                                  : std::uint64_t{at.batch} * plan.scale_rows +
                                                        (at.row >> plan.height_log2);
  store_scale_at(plan, plan.rule, block, row * plan.scale_cols + (col >> plan.vecs_log2));
}

// Stores the outputs of a matrix or a row: the scale, where no block has one, and the amax.
template <class F>
__device__ __forceinline__ void store_whole(const KernelOperand& plan, std::uint32_t i,
                                            float amax) {
  const std::uint32_t bits = magnitude_bits(amax);
  if constexpr (F::kBits == 8)
    if (plan.scale_cols == 0)
      static_cast<float*>(plan.scale)[i] = fp32_factors<F>(plan.rule, plan.rounding, bits).scale;
  if (plan.amax_out && plan.amax_out != plan.reported)
    plan.amax_out[i] = plan.reported ? plan.reported[i] : amax;
}

// ---- A vec16 ------------------------------------------------------------------------------------
// Returns the values to cast: the vec16, or its transform.   T: of the elements in memory; signs:
// of the lane's points
template <class T, class Elements>
__device__ __forceinline__ Vec16<T> transform(const KernelOperand& plan, const Elements& vec,
                                              std::uint32_t signs = kHadamardSigns) {
  if (plan.points == 0) return vec;
  const Vec16<Bf16> transformed = hadamard_vec(vec, plan.points, signs);
  if constexpr (sizeof(T) == 2) {
    return transformed;
  } else {
    Vec16<float> same;
#pragma unroll
    for (int i = 0; i < kVec; ++i) same.v[i] = transformed[i];
    return same;
  }
}

// Returns the amax of a block of one row, from that of each lane's vec16.
__device__ __forceinline__ std::uint32_t amax_of_lanes(std::uint32_t amax, int vecs_log2) {
  for (int lanes = 1; lanes < (1 << vecs_log2); lanes *= 2)
    amax = max(amax, __shfl_xor_sync(kAllLanes, amax, lanes));
  return amax;
}

// Returns the scale of the block of one row that contains the vec16.
template <class C, class Elements>
__device__ __forceinline__ BlockScale scale_of_vec(ScaleRule rule, ScaleRounding rounding,
                                                   const MatrixScale& matrix, std::uint32_t amax,
                                                   const Elements& vec) {
  if constexpr (C::kReadsValues)
    return scale_by_values(rule, rounding, matrix, amax, vec);
  else
    return block_scale<typename C::F>(rule, rounding, matrix, amax);
}

// Returns the codes of a vec16 under +eden, and its scale in `block`. Takes part in an exchange of
// all lanes.
template <class T>
__device__ __forceinline__ Codes<E2M1> encode_eden_at(const KernelOperand& plan,
                                                      const Window& window,
                                                      const MatrixScale& matrix, std::uint32_t amax,
                                                      const Vec16<T>& vec, const Place& at,
                                                      BlockScale& block) {
  block = block_scale<E2M1>(plan.rule, plan.rounding, matrix, amax);
  RandomBits bits = {};
  if (at.row < window.rows)
    bits = eden_bits_at(random_key(plan), random_row(plan, at.all),
                        static_cast<std::uint32_t>((plan.origin_col + at.col) / kEdenPoints));
  return encode_eden(block, vec, eden_bits_of_lane(bits));
}

// Stores the values of codes for an exact product.
template <class F>
__device__ __forceinline__ void store_decoded(const KernelOperand& plan, const Window& window,
                                              const Codes<F>& codes, float scale, const Place& at) {
  store_product_values<F>(codes, scale,
                          plan.decoded + std::uint64_t{at.line} * plan.padded + window.first_col,
                          at.col, window.cols, plan.padded % 8 == 0);
}

// Encodes a vec16 as the plan rounds.
template <class F, class T>
__device__ __forceinline__ Codes<F> encode_at(const KernelOperand& plan, const Vec16<T>& vec,
                                              const BlockScale& block, const Place& at) {
  if (!plan.stochastic) return encode_in_block<F, false>(plan, plan.rule, vec, block, {});
  const RandomKey random = random_key(plan);  // here, so that no loop keeps it in registers
  const RandomBits bits =
      random_bits_at(random.key, random.stream, random_row(plan, at.all),
                     static_cast<std::uint32_t>((plan.origin_col + at.col) / kVec));
  return encode_in_block<F, true>(plan, plan.rule, vec, block, bits);
}

// Casts a vec16.   T: of the elements in memory; amax_2d: the amax of its 2D block, with the choice
// of the scale; null: the block is of one row
template <class C, class T, class Elements>
__device__ __forceinline__ void cast_vec(const KernelOperand& plan, const Window& window,
                                         const MatrixScale& matrix, const Elements& x,
                                         const Place& at, const std::uint32_t* amax_2d = nullptr) {
  using F = typename C::F;
  const bool is_eden = C::kReadsValues && plan.rounding == ScaleRounding::kEden;
  std::uint32_t signs = kHadamardSigns;
  if (is_eden) signs = signs_of_lane(eden_signs(random_key(plan)));
  const Vec16<T> vec = transform<T>(plan, x, signs);
  std::uint32_t amax = 0;
  if (amax_2d)
    amax = *amax_2d;
  else if (plan.scale_cols > 0)
    amax = amax_of_lanes(vec.amax(), plan.vecs_log2);
  BlockScale block;
  Codes<F> codes = {};
  if constexpr (C::kReadsValues)
    if (is_eden) codes = encode_eden_at(plan, window, matrix, amax, vec, at, block);
  if (at.row >= window.rows || at.col >= window.cols) return;

  MatrixScale outer = matrix;
  if (!C::kReadsValues && outer_scale(plan.rule) == OuterScale::kRow) {
    const float active_amax = plan.amax[at.all];
    if constexpr (F::kBits == 8)
      amax = magnitude_bits(active_amax);
    else
      outer = matrix_scale_of<F>(plan.rule, plan.rounding, magnitude_bits(active_amax));
    if (at.col == 0) store_whole<F>(plan, at.all, active_amax);
  } else if (at.col == 0 && at.row == 0 && plan.amax) {
    store_whole<F>(plan, at.batch, plan.amax[at.batch]);
  }
  if (C::kReadsValues && !amax_2d && !is_eden)
    block = scale_of_vec<C>(plan.rule, plan.rounding, matrix, amax, vec);
  else if (!is_eden)
    block = block_scale<F>(plan.rule, plan.rounding, outer, amax);
  if (plan.scale_cols > 0) store_scale(plan, window, block, at);
  if (!is_eden) codes = encode_at<F>(plan, vec, block, at);
  store_codes<F>(plan, window, codes, at);
  if (plan.decoded) store_decoded<F>(plan, window, codes, block.scale, at);
}

}  // namespace minifloat::cuda
