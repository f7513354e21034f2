// A row of a normalisation in the registers of a warp or of a block: its values, the sums of
// core/norm.h, and the normalised values.
//
//     vec16          0       1      …    255      256     …
//     thread         0       1           255      0           of a block
//     lane           0      1      …    31, 0, 1, …           of a warp: each has its own partials
#pragma once

#include <cstdint>

#include "cuda/common/ptx.cuh"
#include "cuda/common/tile.cuh"
#include "minifloat/core/norm.h"
#include "minifloat/norm.h"

namespace minifloat::cuda {

static_assert(kNormUnit == kVec && kNormUnits == kThreads);

// A weight or a bias, (cols).
struct NormParameter {
  const void* data;  // null: `absent`
  bool is_bf16, aligned;
  float absent;
};

struct NormArgs {
  Source x;
  NormParameter weight, bias;
  NormKind kind;
  float eps;
  bool stores_vecs;  // rows without gaps start at multiples of 16 bytes
};

NormArgs norm_args(const Norm& of);

// ---- Vec16s -------------------------------------------------------------------------------------
// Return 16 values, rounded, with the NaN of every backend.
__device__ __forceinline__ void round_values(const float (&v)[kVec], Vec16<float>& out) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) out.v[i] = with_one_nan(v[i]);
}
__device__ __forceinline__ void round_values(const float (&v)[kVec], Vec16<Bf16>& out) {
  std::uint32_t carries = 0;
#pragma unroll
  for (int i = 0; i < kVec / 2; ++i) {
    out.w[i] = cvt_bf16x2(v[2 * i], v[2 * i + 1]);
    carries |= (out.w[i] + 0x0001'0001u) & ~out.w[i];  // the conversion's NaN is 0x7FFF
  }
  if ((carries & 0x8000'8000u) == 0) return;
#pragma unroll
  for (int i = 0; i < kVec / 2; ++i) {
    const std::uint32_t nan = (out.w[i] + 0x0001'0001u) & ~out.w[i] & 0x8000'8000u;
    out.w[i] -= (nan >> 15) * (0x7FFFu - BF16::kNanBits);
  }
}

template <class T>
__device__ __forceinline__ float round_value(float x) {
  if constexpr (sizeof(T) == 4) return x;
  return bit_cast<float>(cvt_bf16x2(x, 0.0f) << 16);
}

// Stores the values before the end of a row of `cols` columns without gaps.
template <class T>
__device__ __forceinline__ void store_values(const Vec16<T>& vec, void* to, std::uint32_t row,
                                             std::uint32_t col, std::uint32_t cols,
                                             bool stores_vecs) {
  T* const at = static_cast<T*>(to) + std::uint64_t{row} * cols + col;
  if (stores_vecs && col + kVec <= cols) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(vec) / sizeof(uint4)); ++i)
      reinterpret_cast<uint4*>(at)[i] = reinterpret_cast<const uint4*>(&vec)[i];
    return;
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    if (col + i >= cols) break;
    if constexpr (sizeof(T) == 4)
      at[i] = vec.v[i];
    else
      at[i] = vec.bits(i);
  }
}

// Returns 16 values of x; zero past the end of the row.
template <class T>
__device__ __forceinline__ Vec16<T> load_row_vec(const NormArgs& args, std::uint32_t row,
                                                 std::uint32_t col) {
  return load_vec<T>(args.x, row_at<T>(args.x, 0, row), col);
}

// Loads 16 elements of a parameter.
__device__ __forceinline__ void load_parameter(const NormParameter& of, std::uint32_t col,
                                               std::uint32_t cols, float (&v)[kVec]) {
  if (!of.data) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] = of.absent;
    return;
  }
  const Source row = {of.data, 0, 0, 1, cols, of.aligned, nullptr};
  const auto load = [&]<class W>(const W* data) {
    const Vec16<W> vec = load_vec<W>(row, data, col);
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] = vec[i];
  };
  of.is_bf16 ? load(static_cast<const Bf16*>(of.data)) : load(static_cast<const float*>(of.data));
}

// Returns 16 values normalised, from column `col` on.
template <class T>
__device__ __forceinline__ Vec16<T> normalise_vec(const NormArgs& args, const Vec16<T>& x,
                                                  const RowStatistics& row, std::uint32_t col) {
  const auto cols = static_cast<std::uint32_t>(args.x.cols);
  float w[kVec], v[kVec];
  load_parameter(args.weight, col, cols, w);
  const auto each = [&]<NormKind kKind>(const float* bias) {
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      v[i] = minifloat::normalise<kKind>(x[i], row, w[i], bias ? bias[i] : 0.0f,
                                         [](float u) { return round_value<T>(u); });
  };
  if (args.kind == NormKind::kRms) {
    each.template operator()<NormKind::kRms>(nullptr);
  } else if (args.kind == NormKind::kRmsRounded) {
    each.template operator()<NormKind::kRmsRounded>(nullptr);
  } else {
    float bias[kVec];
    load_parameter(args.bias, col, cols, bias);
    each.template operator()<NormKind::kLayer>(bias);
  }
  Vec16<T> y;
  round_values(v, y);
  return y;
}

// ---- Rows of whole vec16s of bf16, for casts ----------------------------------------------------
inline constexpr unsigned kNormChunk = 8;  // columns of 16 bytes

// Loads 8 elements of a parameter, from a multiple of 8 on.
__device__ __forceinline__ void load_parameter_chunk(const NormParameter& of, std::uint32_t col,
                                                     float (&v)[kNormChunk]) {
  const auto load = [&]<class W>(const W* from) {
    constexpr unsigned kOfWord = 4 / sizeof(W), kWords = kNormChunk / kOfWord;
    alignas(16) std::uint32_t words[kWords];
    if (of.aligned) {
#pragma unroll
      for (unsigned i = 0; i < kWords / 4; ++i)
        reinterpret_cast<uint4*>(words)[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
#pragma unroll
      for (unsigned i = 0; i < kNormChunk; ++i) {
        const std::uint32_t word = words[i / kOfWord];
        v[i] = bit_cast<float>(kOfWord == 1 ? word : i % 2 ? word & 0xFFFF'0000u : word << 16);
      }
    } else {
#pragma unroll
      for (unsigned i = 0; i < kNormChunk; ++i) {
        if constexpr (kOfWord == 1)
          v[i] = __ldg(from + i);
        else
          v[i] = decode_bf16(__ldg(from + i));
      }
    }
  };
  if (!of.data) {
#pragma unroll
    for (unsigned i = 0; i < kNormChunk; ++i) v[i] = of.absent;
  } else if (of.is_bf16) {
    load(static_cast<const Bf16*>(of.data) + col);
  } else {
    load(static_cast<const float*>(of.data) + col);
  }
}

// Returns 8 normalised values, rounded, with the NaN of every backend.
template <NormKind kKind>
__device__ __forceinline__ uint4 normalise_chunk(const uint4& x, const RowStatistics& row,
                                                 const float (&w)[kNormChunk],
                                                 const float (&b)[kNormChunk]) {
  const std::uint32_t in[4] = {x.x, x.y, x.z, x.w};
  std::uint32_t out[4], carries = 0;
  const auto value = [&](std::uint32_t bits, int i) {
    return minifloat::normalise<kKind>(bit_cast<float>(bits), row, w[i], b[i],
                                       [](float v) { return round_value<Bf16>(v); });
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[i] = cvt_bf16x2(value(in[i] << 16, 2 * i), value(in[i] & 0xFFFF'0000u, 2 * i + 1));
    carries |= (out[i] + 0x0001'0001u) & ~out[i];
  }
  if (carries & 0x8000'8000u) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t nan = (out[i] + 0x0001'0001u) & ~out[i] & 0x8000'8000u;
      out[i] -= (nan >> 15) * (0x7FFFu - BF16::kNanBits);
    }
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

// Returns 16 normalised values, all inside of the row.
template <NormKind kKind>
__device__ __forceinline__ void normalise_chunks(const NormArgs& of, const RowStatistics& row,
                                                 std::uint32_t col, Vec16<Bf16>& vec) {
#pragma unroll
  for (unsigned half = 0; half < 2; ++half) {
    float w[kNormChunk], b[kNormChunk] = {};
    load_parameter_chunk(of.weight, col + half * kNormChunk, w);
    if constexpr (kKind == NormKind::kLayer)
      load_parameter_chunk(of.bias, col + half * kNormChunk, b);
    uint4& chunk = reinterpret_cast<uint4*>(&vec)[half];
    chunk = normalise_chunk<kKind>(chunk, row, w, b);
  }
}
__device__ __forceinline__ Vec16<Bf16> normalise_whole_vec(const NormArgs& of, Vec16<Bf16> vec,
                                                           const RowStatistics& row,
                                                           std::uint32_t col) {
  if (of.kind == NormKind::kRms)
    normalise_chunks<NormKind::kRms>(of, row, col, vec);
  else if (of.kind == NormKind::kRmsRounded)
    normalise_chunks<NormKind::kRmsRounded>(of, row, col, vec);
  else
    normalise_chunks<NormKind::kLayer>(of, row, col, vec);
  return vec;
}

// ---- Sums of a row ------------------------------------------------------------------------------
// Adds the terms of a vec16: x, or (x - mean)².   count: its columns inside of the row
template <bool kSquares, class T>
__device__ __forceinline__ void add_terms(const Vec16<T>& vec, float mean, int count,
                                          float (&partial)[kNormPartials]) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    float& to = partial[i % kNormPartials];
    if constexpr (kSquares) {
      const float d = i < count ? vec[i] - mean : 0.0f;
      to = multiply_add(d, d, to);
    } else {
      to += vec[i];
    }
  }
}

// Returns the sum of `kCount` values, by halves.
template <int kCount>
__device__ __forceinline__ float sum_by_halves(float (&v)[kCount]) {
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
}
// Returns the sum of the lanes of a warp, in each.
__device__ __forceinline__ float sum_of_lanes(float sum) {
#pragma unroll
  for (int half = kNormLanes / 2; half > 0; half /= 2) sum += __shfl_xor_sync(kAllLanes, sum, half);
  return sum;
}

// Returns the sum of all threads of a block, in each.   of_warp: shared, not used before
__device__ __forceinline__ float sum_of_block(float of_thread, float (&of_warp)[kNormRuns]) {
  const float sum = sum_of_lanes(of_thread);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  float of_run[kNormRuns];
#pragma unroll
  for (int i = 0; i < kNormRuns; ++i) of_run[i] = of_warp[i];
  return sum_by_halves(of_run);
}

// A row of at most kVecs vec16s a thread.
template <class T, int kVecs, bool kByWarps>
struct RegisterRow {
  static constexpr std::uint32_t kThreadsOfRow = kByWarps ? 32 : kThreads;
  static constexpr std::uint32_t kRowsOfBlock = kThreads / kThreadsOfRow;
  Vec16<T> vecs[kVecs];

  // Returns the row of the thread.
  __device__ __forceinline__ static std::uint32_t row_of_thread() {
    return blockIdx.x * kRowsOfBlock + (kByWarps ? threadIdx.x / 32 : 0);
  }
  __device__ __forceinline__ static std::uint32_t col_of(int i) {
    return (threadIdx.x % kThreadsOfRow + i * kThreadsOfRow) * kVec;
  }
  __device__ __forceinline__ void load(const NormArgs& args, std::uint32_t row) {
    const auto cols = static_cast<std::uint32_t>(args.x.cols);
    const bool is_inside = row < args.x.rows;
#pragma unroll
    for (int i = 0; i < kVecs; ++i)
      vecs[i] = is_inside && col_of(i) < cols ? load_row_vec<T>(args, row, col_of(i)) : Vec16<T>{};
  }

  template <bool kSquares>
  __device__ __forceinline__ float sum(float mean, int cols, float (&of_warp)[kNormRuns]) const {
    if constexpr (kByWarps) {
      float of_run[kVecs];
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        float partial[kNormPartials] = {};
        add_terms<kSquares>(vecs[i], mean, cols - static_cast<int>(col_of(i)), partial);
        of_run[i] = sum_of_lanes(sum_by_halves(partial));
      }
      return sum_by_halves(of_run);
    } else {
      float partial[kNormPartials] = {};
#pragma unroll
      for (int i = 0; i < kVecs; ++i)
        add_terms<kSquares>(vecs[i], mean, cols - static_cast<int>(col_of(i)), partial);
      return sum_of_block(sum_by_halves(partial), of_warp);
    }
  }

  // Returns the row's statistics, in each of its threads.   shared: not used before
  __device__ __forceinline__ RowStatistics statistics(const NormArgs& args,
                                                      float (&shared)[2][kNormRuns]) const {
    RowStatistics row;
    const int cols = static_cast<int>(args.x.cols);
    const auto count = static_cast<float>(cols);
    if (args.kind == NormKind::kLayer)
      row.mean = __fdiv_rn(sum<false>(0.0f, cols, shared[0]), count);
    row.factor = norm_factor(sum<true>(row.mean, cols, shared[1]), count, args.eps);
    return row;
  }
};

// Calls launch<kVecs, kByWarps>() for rows of `cols` columns. Returns false for longer rows.
inline constexpr std::int64_t kMostRegisterCols = 4 * kThreads * kVec;
template <class Launch>
bool with_register_row(std::int64_t cols, Launch launch) {
  const std::int64_t vecs = ceil_div<std::int64_t>(cols, kVec);
  if (vecs <= 32)
    launch.template operator()<1, true>();
  else if (vecs <= 2 * 32)
    launch.template operator()<2, true>();
  else if (vecs <= 4 * 32)
    launch.template operator()<4, true>();
  else if (vecs <= kThreads)
    launch.template operator()<1, false>();
  else if (vecs <= 2 * kThreads)
    launch.template operator()<2, false>();
  else if (vecs <= 4 * kThreads)
    launch.template operator()<4, false>();
  else
    return false;
  return true;
}

}  // namespace minifloat::cuda
