// 4-bit codes under power-of-two scales -> E4M3 codes of whole rows (core/fp4_as_fp8.h). A warp
// takes a row, or a row of a group along the contraction dimension: its largest scale, then its
// codes, 16 a lane.
//
//     bytes an element: 1/2 of codes, a block's scale, 1 of codes
#include <algorithm>

#include "cuda/backend.h"
#include "cuda/codec/fp4_as_fp8.cuh"
#include "cuda/common/launch.h"
#include "cuda/quantize/cast_vec16.cuh"
#include "minifloat/core/fp4_as_fp8.h"

namespace minifloat::cuda {
namespace {

inline constexpr int kWarps = kThreads / 32;

struct Fp4AsFp8Args {
  Quantized q;
  bool is_mx, aligned_in, aligned_out, has_groups_of_cols;
  int height_log2, width_log2;  // of a block
  std::uint32_t padded, pitch, scale_rows, scale_cols;
  Divisor rows_of_matrix;
  const std::int32_t* boundaries;  // of groups among rows or columns; null: there are no groups
  int groups;
  std::uint8_t* codes;
  float* row_scale;
};

__device__ __forceinline__ int exponent_at(const Fp4AsFp8Args& args, const std::uint8_t* scale,
                                           std::uint32_t block) {
  return args.is_mx ? fp4_exponent_e8m0(scale[block]) : fp4_exponent_e4m3(scale[block]);
}

template <class F>
__device__ __forceinline__ Fp8CodeTable table_of(int exponent, int row_exponent) {
  return exponent == kFp4AsFp8Nan ? fp8_nan_table()
                                  : fp8_code_table<F>(fp4_as_fp8_factor<F>(exponent, row_exponent));
}

// The operands of one launch: those of a product. Rows from `first_rows` on are the second's.
struct Fp4AsFp8Pair {
  Fp4AsFp8Args operands[2];
  std::uint32_t first_rows, second_rows;
};

// A row of the operand as read, or of one of its groups.
struct RowPlace {
  std::uint32_t line;        // row of the buffers
  std::uint32_t part;        // its matrix or group
  std::uint32_t first, end;  // its columns
  const std::uint8_t* scale;
};

// Finds row `i` of all matrices, or of all groups along the contraction dimension. Returns false
// where it lies past the last group.
__device__ __forceinline__ bool find_row(const Fp4AsFp8Args& args, std::uint32_t i, RowPlace& at) {
  at.part = args.rows_of_matrix.divide(i);
  const std::uint32_t row = i - at.part * args.rows_of_matrix.d;
  at.scale = static_cast<const std::uint8_t*>(args.q.scale);
  if (args.has_groups_of_cols) {
    at.line = row;
    at.first = static_cast<std::uint32_t>(__ldg(args.boundaries + at.part));
    at.end = static_cast<std::uint32_t>(__ldg(args.boundaries + at.part + 1));
    at.scale += std::uint64_t{row} * args.scale_cols;
    return true;
  }
  at.line = i, at.first = 0, at.end = args.padded;
  at.scale +=
      (std::uint64_t{at.part} * args.scale_rows + (row >> args.height_log2)) * args.scale_cols;
  if (!args.boundaries) return true;
  if (row >= static_cast<std::uint32_t>(__ldg(args.boundaries + args.groups))) return false;
  at.part = static_cast<std::uint32_t>(
      group_at(args.boundaries, args.groups, static_cast<std::int32_t>(row)));
  return true;
}

// Returns the largest exponent of a row's blocks, by a warp.
__device__ __forceinline__ int largest_exponent(const Fp4AsFp8Args& args, const RowPlace& at) {
  int largest = kFp4AsFp8Zero;
  const std::uint32_t end = (at.end + (1u << args.width_log2) - 1) >> args.width_log2;
#pragma unroll 4
  for (std::uint32_t b = (at.first >> args.width_log2) + threadIdx.x % 32; b < end; b += 32)
    largest = max(largest, exponent_at(args, at.scale, b));
  return __reduce_max_sync(kAllLanes, largest);
}

// Returns the scale of a row.   part: its matrix or group
template <class F>
__device__ __forceinline__ float row_scale_of(const Fp4AsFp8Args& args, int row_exponent,
                                              std::uint32_t part) {
  const float tensor = args.is_mx ? 1.0f : scale_above_blocks(args.q.spec, args.q.amax[part]);
  return fp4_as_fp8_row_scale<F>(row_exponent, tensor);
}

// Returns the 16 codes from `col` on, zeros past the end of the row.
__device__ __forceinline__ uint2 load_fp4_codes(const Fp4AsFp8Args& args, const std::uint8_t* from,
                                                std::uint32_t col, std::uint32_t end) {
  if (col >= end) return {};
  if (args.aligned_in && end - col >= kVec)
    return __ldg(reinterpret_cast<const uint2*>(from + col / 2));
  std::uint32_t w[2] = {};
#pragma unroll
  for (std::uint32_t i = 0; i < kVec; i += 2)
    if (col + i < end) w[i / 8] |= static_cast<std::uint32_t>(from[(col + i) / 2]) << (i % 8 * 4);
  return make_uint2(w[0], w[1]);
}

// Stores the FP8 codes of 16 codes at `col`, up to the end of the row.
__device__ __forceinline__ void store_fp8_codes(const Fp4AsFp8Args& args, const Fp8CodeTable& table,
                                                uint2 w, std::uint8_t* to, std::uint32_t col,
                                                std::uint32_t end) {
  if (col >= end) return;
  const uint4 codes = fp8_codes(table, w.x, w.y);
  if (args.aligned_out && end - col >= kVec) {
    *reinterpret_cast<uint4*>(to + col) = codes;
    return;
  }
  const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (std::uint32_t i = 0; i < kVec; ++i)
    if (col + i < end) to[col + i] = static_cast<std::uint8_t>(words[i / 4] >> (i % 4 * 8));
}

// Writes row `i` of all of an operand's rows, by a warp.
template <class F>
__device__ __forceinline__ void write_row(const Fp4AsFp8Args& args, std::uint32_t i,
                                          const RowPlace& at) {
  constexpr std::uint32_t kTogether = 4, kStep = 32 * kVec;
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint8_t* from = args.q.codes + std::uint64_t{at.line} * args.pitch;
  std::uint8_t* to = args.codes + std::uint64_t{at.line} * args.padded;

  uint2 codes[kTogether];
  const auto load = [&](std::uint32_t col) {
#pragma unroll
    for (std::uint32_t j = 0; j < kTogether; ++j)
      codes[j] = load_fp4_codes(args, from, col + j * kStep, at.end);
  };
  std::uint32_t col = at.first + lane * kVec;
  load(col);
  const int row_exponent = fp4_row_exponent<F>(largest_exponent(args, at));
  if (lane == 0) args.row_scale[i] = row_scale_of<F>(args, row_exponent, at.part);
  while (col < at.end) {
#pragma unroll
    for (std::uint32_t j = 0; j < kTogether; ++j) {
      const std::uint32_t here = col + j * kStep;
      if (here >= at.end) break;
      const Fp8CodeTable table =
          table_of<F>(exponent_at(args, at.scale, here >> args.width_log2), row_exponent);
      store_fp8_codes(args, table, codes[j], to, here, at.end);
    }
    col += kTogether * kStep;
    load(col);
  }
}

__global__ void __launch_bounds__(kThreads)
    write_as_fp8(const __grid_constant__ Fp4AsFp8Pair pair) {
  const std::uint32_t all = blockIdx.x * kWarps + threadIdx.x / 32;
  const bool is_second = all >= pair.first_rows;
  if (is_second && all - pair.first_rows >= pair.second_rows) return;  // the whole warp
  const Fp4AsFp8Args& args = pair.operands[is_second];
  const std::uint32_t i = is_second ? all - pair.first_rows : all;
  RowPlace at;
  if (!find_row(args, i, at)) return;
  if (args.q.spec.elements == Elements::kE1m2)
    write_row<E1M2>(args, i, at);
  else
    write_row<E2M1>(args, i, at);
}

// Returns the rows that take a warp each.
std::int64_t warps_of(const Quantized& q) {
  return q.rows * (q.groups.unit > 0 ? q.parts() : q.batch);
}

Fp4AsFp8Args args_of(const Fp4AsFp8Cast& to) {
  const auto& [q, codes, row_scale] = to;
  const Spec& spec = q.spec;
  const std::int64_t padded = spec.padded_cols(q.cols), rows = warps_of(q);
  MINIFLOAT_CHECK(
      rows < std::int64_t{1} << 30 && padded < std::int64_t{1} << 31,
      "fp4_as_fp8: expected less than 2^30 rows of all matrices or groups and 2^31 columns, got ",
      rows, " and ", padded);
  Fp4AsFp8Args args = {};
  args.q = q;
  args.is_mx = spec.rule == ScaleRule::kMx;
  args.height_log2 = __builtin_ctz(static_cast<unsigned>(spec.block_rows));
  args.width_log2 = __builtin_ctz(static_cast<unsigned>(spec.block_cols));
  args.padded = static_cast<std::uint32_t>(padded);
  args.pitch = static_cast<std::uint32_t>(spec.code_cols(q.cols));
  args.scale_rows = static_cast<std::uint32_t>(spec.scale_rows(q.rows));
  args.scale_cols = static_cast<std::uint32_t>(spec.scale_cols(q.cols));
  args.rows_of_matrix = Divisor(std::max<std::int64_t>(q.rows, 1));
  args.boundaries = q.groups ? q.groups.under(q.groups.unit) : nullptr;
  args.groups = q.groups.count;
  args.has_groups_of_cols = q.groups.unit > 0;
  args.aligned_in = args.pitch % 8 == 0 && reinterpret_cast<std::uintptr_t>(q.codes) % 8 == 0;
  args.aligned_out = padded % 16 == 0 && reinterpret_cast<std::uintptr_t>(codes) % 16 == 0;
  args.codes = codes, args.row_scale = row_scale;
  return args;
}

}  // namespace

void fp4_as_fp8(std::span<const Fp4AsFp8Cast> operands, const Execution& execution) {
  for (std::size_t i = 0; i < operands.size(); i += 2) {
    Fp4AsFp8Pair pair = {};
    pair.operands[0] = args_of(operands[i]);
    const std::int64_t first = warps_of(operands[i].operand);
    std::int64_t second = 0;
    if (i + 1 < operands.size()) {
      pair.operands[1] = args_of(operands[i + 1]);
      second = warps_of(operands[i + 1].operand);
    }
    if (first + second == 0) continue;
    pair.first_rows = static_cast<std::uint32_t>(first);
    pair.second_rows = static_cast<std::uint32_t>(second);
    write_as_fp8<<<grid_of(ceil_div<std::int64_t>(first + second, kWarps), "fp4_as_fp8"), kThreads,
                   0, cuda_stream(execution)>>>(pair);
    check_launch("fp4_as_fp8");
  }
}

}  // namespace minifloat::cuda
