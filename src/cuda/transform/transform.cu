// The Hadamard transform alone, and the transpose of packed codes.
#include "cuda/backend.h"
#include "cuda/common/groups.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/tile.cuh"
#include "cuda/transform/transpose_tile.cuh"

namespace minifloat::cuda {
namespace {

// ---- Hadamard -----------------------------------------------------------------------------------
struct HadamardArgs {
  KernelInput x;
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
  const HadamardArgs args = {kernel_input(x),
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
