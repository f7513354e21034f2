// The Hadamard transform alone, the swizzled scale layout, and the transpose of packed codes.
#include "cuda/backend.h"
#include "cuda/common/groups.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/tile.cuh"
#include "cuda/transform/transpose_tile.cuh"
#include "minifloat/core/swizzle.h"

namespace minifloat::cuda {
namespace {

// ---- Hadamard -----------------------------------------------------------------------------------
struct HadamardArgs {
  Source x;
  DeviceGroups groups;
  int points;
  std::uint32_t signs;
  std::uint32_t rows, padded;  // as read
  bool aligned;
  Bf16* out;  // (batch, rows, padded)
};
template <class Elements>
__device__ __forceinline__ void transform_and_store(const HadamardArgs& args, const Window& window,
                                                    const Elements& vec, const Place& at) {
  Vec16<Bf16> transformed = hadamard_vec(vec, args.points, args.signs);
  if (at.row >= window.rows || at.col >= window.cols) return;  // a whole number of vec16s
  Bf16* to = args.out + std::uint64_t{at.line} * args.padded + window.first_col + at.col;
  if (args.aligned && transformed.amax() <= Float32::kExponent) {
    reinterpret_cast<uint4*>(to)[0] =
        make_uint4(transformed.w[0], transformed.w[1], transformed.w[2], transformed.w[3]);
    reinterpret_cast<uint4*>(to)[1] =
        make_uint4(transformed.w[4], transformed.w[5], transformed.w[6], transformed.w[7]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const std::uint32_t bits = transformed.bits(i);
    to[i] = static_cast<Bf16>((bits & 0x7FFFu) > BF16::kInfBits ? BF16::kNanBits : bits);
  }
}
template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    hadamard_rows(const __grid_constant__ HadamardArgs args,
                  const __grid_constant__ RowVecs all_rows) {
  RowVecs layout = all_rows;
  if (!end_at_last_group(args.groups, layout)) return;
  const Window window = {args.rows, args.padded, 0, 0, 0};
  each_vec_of_rows<T>(args.x, layout, [&](const Vec16<T>& vec, Place at) {
    if (at.all >= layout.end_row) at.row = args.rows;
    transform_and_store(args, window, vec, at);
  });
}
template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 5 : 3)
    hadamard_columns(const __grid_constant__ HadamardArgs args,
                     const __grid_constant__ Tiles tiles) {
  extern __shared__ __align__(16) std::uint32_t words[];
  TilePart part;
  if (!find_part<T>(args.x, args.groups, tile_place(tiles), part)) return;
  const TilePlace& tile = part.tile;
  const SharedTile<T> shared = {words};
  shared.fill(part.x, tile);
  shared.wait();
  const Window window = window_of<true>(part, args.rows, args.padded);
  const std::uint32_t col = tile.row + threadIdx.x % kVecColumns * kVec;
  shared.template each_vec<true>([&](const auto& vec, unsigned row) {
    transform_and_store(args, window, vec, place_in(window, tile.batch, tile.col + row, col));
  });
}
template <class T>
void launch_hadamard(const HadamardArgs& args, std::int64_t batch, bool columnwise,
                     cudaStream_t stream) {
  const bool has_columns_of_groups = columnwise && args.groups.count > 0;
  if (args.x.cols == 0 || (batch * args.x.rows == 0 && !has_columns_of_groups)) return;
  if (!columnwise)
    return each_launch_of_rows(batch, args.x, args.padded, args.points / kVec,
                               [&](const RowVecs& layout, unsigned grid) {
                                 hadamard_rows<T><<<grid, kThreads, 0, stream>>>(args, layout);
                                 check_launch("hadamard");
                               });
  const Tiles tiles = tiles_of(args.x, args.groups);
  constexpr std::size_t kBytes = SharedTile<T>::kBytes;
  allow_shared(hadamard_columns<T>, kBytes, "hadamard");
  hadamard_columns<T>
      <<<tile_grid(batch, tiles, "hadamard"), kThreads, kBytes, stream>>>(args, tiles);
  check_launch("hadamard");
}

// ---- Swizzled scales ----------------------------------------------------------------------------
struct SwizzleArgs {
  ScaleMatrix shape;
  std::int64_t bytes;  // of a swizzled matrix
  bool inverse;
  const std::uint8_t* in;
  std::uint8_t* out;
};

// The tiles of a dense matrix's layout that a block gathers and writes with their padding. They are
// neighbours in the layout.
inline constexpr int kTilesOfBlock = 16;
__global__ void __launch_bounds__(kThreads)
    swizzle_dense(const __grid_constant__ SwizzleArgs args, std::uint32_t tiles_of_row,
                  std::uint32_t rows_of_tiles) {
  constexpr int kWordsOfTile = static_cast<int>(kSwizzleTileRows * kSwizzleTileCols) / 4;
  constexpr int kChunks = kTilesOfBlock / 4;  // of 16 bytes
  __shared__ __align__(16) std::uint32_t words[kTilesOfBlock * kWordsOfTile];
  const std::uint32_t across = (tiles_of_row + kTilesOfBlock - 1) / kTilesOfBlock;
  const std::uint32_t of_rows = blockIdx.x / across, e = of_rows / rows_of_tiles;
  const std::uint32_t tile_row = of_rows - e * rows_of_tiles;
  const std::uint32_t tile_col = (blockIdx.x - of_rows * across) * kTilesOfBlock;
  const std::int64_t rows = args.shape.rows, cols = args.shape.cols;
  const std::uint8_t* in = args.in + static_cast<std::int64_t>(e) * rows * cols;
  const bool aligned = cols % 16 == 0 && reinterpret_cast<std::uintptr_t>(args.in) % 16 == 0;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(kSwizzleTileRows) * kChunks;
       i += kThreads) {
    const int r = i / kChunks, chunk = i % kChunks;
    const std::int64_t row = static_cast<std::int64_t>(tile_row) * kSwizzleTileRows + r;
    const std::int64_t col = static_cast<std::int64_t>(tile_col) * kSwizzleTileCols + chunk * 16;
    uint4 w = {};
    if (row < rows && aligned && col < cols) {
      w = __ldg(reinterpret_cast<const uint4*>(in + row * cols + col));
    } else if (row < rows) {
      std::uint32_t* to = &w.x;
#pragma unroll
      for (int k = 0; k < 16; ++k)
        if (col + k < cols)
          to[k / 4] |= static_cast<std::uint32_t>(in[row * cols + col + k]) << (k % 4 * 8);
    }
    const std::uint32_t four[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int t = 0; t < 4; ++t)
      words[(chunk * 4 + t) * kWordsOfTile + r % 32 * 4 + r / 32] = four[t];
  }
  __syncthreads();
  const std::int64_t first = static_cast<std::int64_t>(tile_row) * tiles_of_row + tile_col;
  const int tiles = static_cast<int>(min(tiles_of_row - tile_col, std::uint32_t{kTilesOfBlock}));
  std::uint8_t* out = args.out + e * args.bytes + first * (kSwizzleTileRows * kSwizzleTileCols);
  const bool whole = reinterpret_cast<std::uintptr_t>(args.out) % 16 == 0;
  for (int i = static_cast<int>(threadIdx.x); i < tiles * kWordsOfTile / 4; i += kThreads) {
    const uint4 chunk = reinterpret_cast<const uint4*>(words)[i];
    if (whole)
      reinterpret_cast<uint4*>(out)[i] = chunk;
    else
      for (int k = 0; k < 16; ++k)
        out[16 * i + k] = reinterpret_cast<const std::uint8_t*>(words)[16 * i + k];
  }
}
void launch_swizzle_dense(const SwizzleArgs& args, cudaStream_t stream) {
  const std::int64_t tiles_of_row = ceil_div(args.shape.cols, kSwizzleTileCols),
                     rows_of_tiles = ceil_div(args.shape.rows, kSwizzleTileRows);
  const std::int64_t blocks =
      args.shape.batch * rows_of_tiles * ceil_div<std::int64_t>(tiles_of_row, kTilesOfBlock);
  if (blocks == 0) return;
  swizzle_dense<<<grid_of(blocks, "swizzle_scales"), kThreads, 0, stream>>>(
      args, static_cast<std::uint32_t>(tiles_of_row), static_cast<std::uint32_t>(rows_of_tiles));
  check_launch("swizzle_scales");
}

// Returns the place of scale (r, c) of a matrix.
__device__ std::int64_t swizzled_place(const ScaleMatrix& m, std::int64_t r, std::int64_t c) {
  if (m.kind == Groups::kNone) return swizzled_offset(r, c, m.cols);
  const bool along_m = m.kind == Groups::kAlongM;
  const std::int64_t at = along_m ? r : c;
  std::int64_t begin = 0, padded = 0;
  for (std::int64_t g = 0; g < m.groups; ++g) {
    const std::int64_t end = m.offsets[g];
    if (at < end)
      return along_m ? swizzled_offset_group_m(padded, r - begin, c, m.cols)
                     : swizzled_offset_group_k(padded, r, c - begin, m.rows, end - begin);
    padded += round_up(end - begin, along_m ? kSwizzleTileRows : kSwizzleTileCols);
    begin = end;
  }
  return -1;  // past the last group
}
__global__ void __launch_bounds__(kThreads) swizzle(const __grid_constant__ SwizzleArgs args) {
  const std::int64_t count = args.shape.rows * args.shape.cols;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= args.shape.batch * count) return;
  const std::int64_t e = i / count, r = (i - e * count) / args.shape.cols,
                     c = (i - e * count) % args.shape.cols;
  const std::int64_t place = swizzled_place(args.shape, r, c);
  if (place < 0) return;
  if (args.inverse)
    args.out[i] = args.in[e * args.bytes + place];
  else
    args.out[e * args.bytes + place] = args.in[i];
}
void launch_swizzle(const SwizzleArgs& args, cudaStream_t stream) {
  const std::int64_t threads = args.shape.batch * args.shape.rows * args.shape.cols;
  if (threads == 0) return;
  swizzle<<<grid_of(ceil_div<std::int64_t>(threads, kThreads), "swizzle_scales"), kThreads, 0,
            stream>>>(args);
  check_launch("swizzle_scales");
}

// ---- Nibbles ------------------------------------------------------------------------------------
struct NibbleArgs {
  NibbleMatrix first;
  Divisor across, down;
};
__global__ void __launch_bounds__(kThreads, 5)
    transpose_tile(const __grid_constant__ NibbleArgs args) {
  __shared__ std::uint32_t words[kTransposeWords];
  const std::uint32_t of_rows = args.across.divide(blockIdx.x), e = args.down.divide(of_rows);
  NibbleMatrix m = args.first;
  m.codes += e * m.rows * m.in_pitch, m.out += e * m.cols * m.out_pitch;
  transpose_nibble_tile(
      m, static_cast<std::int64_t>(of_rows - e * args.down.d) * kNibbleRows,
      static_cast<std::int64_t>(blockIdx.x - of_rows * args.across.d) * kNibbleCols, words);
}

}  // namespace

void hadamard(const TensorRef& x, int points, bool columnwise, std::uint32_t signs,
              std::uint16_t* out, const Execution& execution) {
  const std::int64_t rows = columnwise ? x.cols : x.rows;
  const std::int64_t length =
      x.groups ? grouped_cols<std::int64_t>(x.rows, x.groups.unit, x.groups.count) : x.rows;
  const std::int64_t padded = round_up<std::int64_t>(columnwise ? length : x.cols, points);
  MINIFLOAT_CHECK(x.batch * rows < std::int64_t{1} << 31 && padded < std::int64_t{1} << 31,
                  "hadamard: expected less than 2^31 rows in all and 2^31 columns, got ",
                  x.batch * rows, " and ", padded);
  const HadamardArgs args = {source_of(x),
                             device_groups(x.groups),
                             points,
                             signs,
                             static_cast<std::uint32_t>(rows),
                             static_cast<std::uint32_t>(padded),
                             reinterpret_cast<std::uintptr_t>(out) % 16 == 0,
                             out};
  x.dtype == DType::kFloat32
      ? launch_hadamard<float>(args, x.batch, columnwise, cuda_stream(execution))
      : launch_hadamard<Bf16>(args, x.batch, columnwise, cuda_stream(execution));
}

void swizzle_scales(const ScaleMatrix& shape, const std::uint8_t* scale, std::uint8_t* out,
                    const Execution& execution) {
  const std::int64_t bytes = shape.swizzled_bytes();
  if (shape.batch * bytes == 0) return;
  if (shape.kind == Groups::kNone)
    return launch_swizzle_dense({shape, bytes, false, scale, out}, cuda_stream(execution));
  check(cudaMemsetAsync(out, 0, static_cast<std::size_t>(shape.batch * bytes),
                        cuda_stream(execution)),
        "swizzle_scales");
  launch_swizzle({shape, bytes, false, scale, out}, cuda_stream(execution));
}

void unswizzle_scales(const ScaleMatrix& shape, const std::uint8_t* swizzled, std::uint8_t* out,
                      const Execution& execution) {
  launch_swizzle({shape, shape.swizzled_bytes(), true, swizzled, out}, cuda_stream(execution));
}

void transpose_nibbles(const CodeMatrix& codes, std::uint8_t* out, const Execution& execution) {
  if (codes.batch * codes.rows * codes.cols == 0) return;
  const NibbleMatrix m = nibble_matrix(codes.codes, out, codes.rows, codes.cols);
  const NibbleArgs args = {m, Divisor(ceil_div<std::int64_t>(codes.cols, kNibbleCols)),
                           Divisor(ceil_div<std::int64_t>(codes.rows, kNibbleRows))};
  const std::int64_t tiles = codes.batch * args.across.d * args.down.d;
  transpose_tile<<<grid_of(tiles, "transpose_nibbles"), kThreads, 0, cuda_stream(execution)>>>(
      args);
  check_launch("transpose_nibbles");
}

}  // namespace minifloat::cuda
