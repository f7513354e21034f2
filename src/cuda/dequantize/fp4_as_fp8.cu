// E2M1 codes under power-of-two scales -> E4M3 codes of whole rows (core/fp4_as_fp8.h). A block
// takes a row: its largest scale, then its codes, 16 a thread. Of groups along the contraction
// dimension a warp takes a row of a group.
//
//     bytes an element: 1/2 of codes, a block's scale, 1 of codes
#include <algorithm>

#include "cuda/backend.h"
#include "cuda/common/launch.h"
#include "cuda/quantize/cast_vec16.cuh"
#include "minifloat/core/fp4_as_fp8.h"

namespace minifloat::cuda {
namespace {

inline constexpr int kWarps = kThreads / 32;

struct Fp4AsFp8Args {
  Quantized q;
  bool is_mx, aligned_in, aligned_out;
  int height_log2, width_log2;  // of a block
  std::uint32_t padded, pitch, scale_rows, scale_cols;
  Divisor rows_of_matrix;
  const std::int32_t* boundaries;  // of groups among rows or columns; null: there are no groups
  int groups;
  Divisor blocks_of_group;
  std::uint8_t* codes;
  float* row_scale;
};

__device__ __forceinline__ int exponent_at(const Fp4AsFp8Args& args, const std::uint8_t* scale,
                                           std::uint32_t block) {
  return args.is_mx ? fp4_exponent_e8m0(scale[block]) : fp4_exponent_e4m3(scale[block]);
}

// The E4M3 codes of E2M1's eight magnitudes in a block, four a word.
struct Table {
  std::uint32_t low, high;
  std::uint32_t signs;  // the bits that a code's sign may set: none for NaN
};
__device__ __forceinline__ Table fp8_code_table(int exponent, int row_exponent) {
  if (exponent == kFp4AsFp8Nan)
    return {E4M3::kNanBits * 0x0101'0101u, E4M3::kNanBits * 0x0101'0101u, 0};
  const float one = fp4_as_fp8_factor(exponent, row_exponent);
  return {cvt_e4m3x2(0.0f, 0.5f * one) | cvt_e4m3x2(one, 1.5f * one) << 16,
          cvt_e4m3x2(2.0f * one, 3.0f * one) | cvt_e4m3x2(4.0f * one, 6.0f * one) << 16,
          0x8080'8080u};
}
// Returns the FP8 codes of four codes in the low nibbles of w.
__device__ __forceinline__ std::uint32_t four_fp8_codes(const Table& table, std::uint32_t w) {
  const std::uint32_t magnitude = __byte_perm(table.low, table.high, w & 0x7777u);
  // The byte is 0x80 for a selector of 0; a selector of 8 fills it with that byte's sign.
  const std::uint32_t sign = permute_bytes(0x80u, 0u, w & 0x8888u);
  return magnitude | ((sign << 1) & table.signs);
}

// The operands of one launch: those of a product. Blocks from `first_blocks` on are the second's.
struct Fp4AsFp8Pair {
  Fp4AsFp8Args operands[2];
  std::uint32_t first_blocks;
};

// Returns the largest exponent of the blocks [first, end) of a row.   thread, threads: of those
// that share the row
__device__ __forceinline__ int largest_exponent(const Fp4AsFp8Args& args, const std::uint8_t* scale,
                                                std::uint32_t first, std::uint32_t end,
                                                std::uint32_t thread, std::uint32_t threads) {
  int largest = kFp4AsFp8Zero;
  for (std::uint32_t b = first + thread; b < end; b += threads)
    largest = max(largest, exponent_at(args, scale, b));
  return __reduce_max_sync(kAllLanes, largest);
}

// Returns the scale of a row.   part: its matrix or group
__device__ __forceinline__ float row_scale_of(const Fp4AsFp8Args& args, int row_exponent,
                                              std::uint32_t part) {
  const float tensor = args.is_mx
                           ? 1.0f
                           : scale_of_tensor<E2M1>(args.q.spec.rule, args.q.spec.scale_rounding,
                                                   magnitude_bits(args.q.amax[part]))
                                 .scale;
  return fp4_as_fp8_row_scale(row_exponent, tensor);
}

// Converts the codes of columns [first, end) of row `line` of the buffers.
__device__ __forceinline__ void write_row_as_fp8(const Fp4AsFp8Args& args,
                                                 const std::uint8_t* scale, int row_exponent,
                                                 std::uint32_t line, std::uint32_t first,
                                                 std::uint32_t end, std::uint32_t thread,
                                                 std::uint32_t threads) {
  const std::uint8_t* from = args.q.codes + std::uint64_t{line} * args.pitch;
  std::uint8_t* to = args.codes + std::uint64_t{line} * args.padded;
  for (std::uint32_t col = first + thread * kVec; col < end; col += threads * kVec) {
    const Table table =
        fp8_code_table(exponent_at(args, scale, col >> args.width_log2), row_exponent);
    const int left = static_cast<int>(min(end - col, std::uint32_t{kVec}));
    std::uint32_t w[2] = {};
    if (args.aligned_in && left == kVec) {
      const uint2 both = __ldg(reinterpret_cast<const uint2*>(from + col / 2));
      w[0] = both.x, w[1] = both.y;
    } else {
#pragma unroll
      for (int i = 0; i < kVec; i += 2)
        if (i < left) w[i / 8] |= static_cast<std::uint32_t>(from[(col + i) / 2]) << (i % 8 * 4);
    }
    const uint4 codes = make_uint4(four_fp8_codes(table, w[0]), four_fp8_codes(table, w[0] >> 16),
                                   four_fp8_codes(table, w[1]), four_fp8_codes(table, w[1] >> 16));
    if (args.aligned_out && left == kVec) {
      *reinterpret_cast<uint4*>(to + col) = codes;
    } else {
      const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        if (i < left) to[col + i] = static_cast<std::uint8_t>(words[i / 4] >> (i % 4 * 8));
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    write_rows_as_fp8(const __grid_constant__ Fp4AsFp8Pair pair) {
  __shared__ int of_warp[kWarps];
  const bool is_second = blockIdx.x >= pair.first_blocks;
  const Fp4AsFp8Args& args = pair.operands[is_second];
  const std::uint32_t all = is_second ? blockIdx.x - pair.first_blocks : blockIdx.x;
  std::uint32_t part = args.rows_of_matrix.divide(all);
  const std::uint32_t row = all - part * args.rows_of_matrix.d;
  const std::uint8_t* scale =
      static_cast<const std::uint8_t*>(args.q.scale) +
      (std::uint64_t{part} * args.scale_rows + (row >> args.height_log2)) * args.scale_cols;
  if (args.boundaries) {
    if (row >= static_cast<std::uint32_t>(__ldg(args.boundaries + args.groups))) return;
    part = static_cast<std::uint32_t>(
        group_at(args.boundaries, args.groups, static_cast<std::int32_t>(row)));
  }

  // ---- The row's exponent
  int largest = largest_exponent(args, scale, 0, args.scale_cols, threadIdx.x, kThreads);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
  largest = __reduce_max_sync(kAllLanes, of_warp[threadIdx.x % kWarps]);
  const int row_exponent = fp4_row_exponent(largest);
  if (threadIdx.x == 0) args.row_scale[all] = row_scale_of(args, row_exponent, part);

  // ---- Its codes
  write_row_as_fp8(args, scale, row_exponent, all, 0, args.padded, threadIdx.x, kThreads);
}

// Converts groups along the contraction dimension: a warp takes a row of a group.
__global__ void __launch_bounds__(kThreads)
    write_groups_as_fp8(const __grid_constant__ Fp4AsFp8Pair pair) {
  const bool is_second = blockIdx.x >= pair.first_blocks;
  const Fp4AsFp8Args& args = pair.operands[is_second];
  const std::uint32_t block = is_second ? blockIdx.x - pair.first_blocks : blockIdx.x;
  const std::uint32_t rows = args.rows_of_matrix.d, lane = threadIdx.x % 32;
  const std::uint32_t e = args.blocks_of_group.divide(block);
  const std::uint32_t row = (block - e * args.blocks_of_group.d) * kWarps + threadIdx.x / 32;
  if (row >= rows) return;  // the whole warp
  const auto first = static_cast<std::uint32_t>(__ldg(args.boundaries + e)),
             end = static_cast<std::uint32_t>(__ldg(args.boundaries + e + 1));
  const std::uint8_t* scale =
      static_cast<const std::uint8_t*>(args.q.scale) + std::uint64_t{row} * args.scale_cols;
  const int row_exponent = fp4_row_exponent(
      largest_exponent(args, scale, first >> args.width_log2, end >> args.width_log2, lane, 32));
  if (lane == 0) args.row_scale[e * rows + row] = row_scale_of(args, row_exponent, e);
  write_row_as_fp8(args, scale, row_exponent, row, first, end, lane, 32);
}

Fp4AsFp8Args args_of(const Fp4AsFp8Cast& to) {
  const auto& [q, codes, row_scale] = to;
  const Spec& spec = q.spec;
  const std::int64_t padded = spec.padded_cols(q.cols), rows = q.batch * q.rows;
  MINIFLOAT_CHECK(rows < std::int64_t{1} << 30 && padded < std::int64_t{1} << 31,
                  "fp4_as_fp8: expected less than 2^30 rows in all and 2^31 columns, got ", rows,
                  " and ", padded);
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
  args.blocks_of_group = Divisor(std::max<std::int64_t>(ceil_div<std::int64_t>(q.rows, kWarps), 1));
  args.aligned_in = args.pitch % 8 == 0 && reinterpret_cast<std::uintptr_t>(q.codes) % 8 == 0;
  args.aligned_out = padded % 16 == 0 && reinterpret_cast<std::uintptr_t>(codes) % 16 == 0;
  args.codes = codes, args.row_scale = row_scale;
  return args;
}

// Returns whether an operand's groups lie along the contraction dimension.
bool has_groups_along_cols(const Fp4AsFp8Cast& cast) { return cast.operand.groups.unit > 0; }

// Converts the first operand, and the second where there is one, in one launch. The groups of both
// lie along the contraction dimension, or those of neither do.
void launch(const Fp4AsFp8Cast* first, const Fp4AsFp8Cast* second, const Execution& execution) {
  Fp4AsFp8Pair pair = {};
  std::int64_t blocks[2] = {};
  const bool along_cols = has_groups_along_cols(*first);
  for (int i = 0; i < (second ? 2 : 1); ++i) {
    const Fp4AsFp8Cast& cast = *(i == 0 ? first : second);
    pair.operands[i] = args_of(cast);
    blocks[i] = along_cols ? std::int64_t{pair.operands[i].blocks_of_group.d} * cast.operand.parts()
                           : cast.operand.batch * cast.operand.rows;
    if (cast.operand.rows == 0) blocks[i] = 0;
  }
  if (blocks[0] + blocks[1] == 0) return;
  pair.first_blocks = static_cast<std::uint32_t>(blocks[0]);
  const auto kernel = along_cols ? write_groups_as_fp8 : write_rows_as_fp8;
  kernel<<<grid_of(blocks[0] + blocks[1], "fp4_as_fp8"), kThreads, 0, cuda_stream(execution)>>>(
      pair);
  check_launch("fp4_as_fp8");
}

}  // namespace

void fp4_as_fp8(std::span<const Fp4AsFp8Cast> operands, const Execution& execution) {
  for (std::size_t i = 0; i < operands.size();) {
    const Fp4AsFp8Cast& first = operands[i++];
    const bool is_pair =
        i < operands.size() && has_groups_along_cols(operands[i]) == has_groups_along_cols(first);
    launch(&first, is_pair ? &operands[i++] : nullptr, execution);
  }
}

}  // namespace minifloat::cuda
