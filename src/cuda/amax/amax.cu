// max |x| on bit patterns, so that NaN survives and the order of the reduction does not matter.
//
//     rows          a warp a row; integer atomics raise a tensor's maximum. Without gaps between
//                   rows, 16 KiB count as one row
//     panels        columns, rows from the same read, or a whole tensor: a block takes 512 bytes of
//                   256 rows
//
// amax_transformed.cu has the maxima of transformed values.
//
//     bytes an element: 2 or 4
#include <cstring>

#include "cuda/amax/amax.h"
#include "cuda/backend.h"
#include "cuda/common/groups.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/reduce.cuh"
#include "cuda/common/tile.cuh"

namespace minifloat::cuda {
namespace {

// Returns the larger magnitudes of two words: of one float, or of a pair of bf16 that stay apart.
template <class T>
__device__ __forceinline__ std::uint32_t max_words(std::uint32_t m, std::uint32_t w) {
  return sizeof(T) == 2 ? __vmaxu2(m, w & 0x7FFF'7FFFu) : max(m, w & Float32::kMagnitude);
}
template <class T>
__device__ __forceinline__ std::uint32_t larger_half(std::uint32_t m) {
  return sizeof(T) == 2 ? max(m & 0xFFFF'0000u, m << 16) : m;
}
template <class T>
__device__ __forceinline__ std::uint32_t max_chunk(std::uint32_t m, const uint4& chunk) {
  return max_words<T>(max_words<T>(max_words<T>(max_words<T>(m, chunk.x), chunk.y), chunk.z),
                      chunk.w);
}
template <class T>
__device__ __forceinline__ std::uint32_t element_amax(T x) {
  if constexpr (sizeof(T) == 2)
    return (static_cast<std::uint32_t>(x) << 16) & Float32::kMagnitude;
  else
    return magnitude_bits(x);
}

// ---- Rows ---------------------------------------------------------------------------------------
// Returns the maximum of a row, in every lane of the warp.
template <class T>
__device__ __forceinline__ std::uint32_t row_amax(const KernelInput& x, const T* row) {
  constexpr std::int64_t kChunk = 16 / sizeof(T);
  const int lane = threadIdx.x % 32;
  std::uint32_t m = 0;
  std::int64_t done = 0;
  if (x.aligned) {
    const std::int64_t chunks = x.cols / kChunk;
    const uint4* from = reinterpret_cast<const uint4*>(row);
    constexpr int kTogether = 8;  // chunks in flight
    std::int64_t i = lane;
    for (; i + (kTogether - 1) * 32 < chunks; i += kTogether * 32) {
      uint4 chunk[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) chunk[k] = __ldg(from + i + k * 32);
#pragma unroll
      for (int k = 0; k < kTogether; ++k) m = max_chunk<T>(m, chunk[k]);
    }
    for (; i < chunks; i += 32) m = max_chunk<T>(m, __ldg(from + i));
    m = larger_half<T>(m);
    done = chunks * kChunk;
  }
  for (std::int64_t c = done + lane; c < x.cols; c += 32) m = max(m, element_amax<T>(row[c]));
  return warp_max(m);
}
// Writes the amaxes of rows. A block takes 8 rows of a matrix.   out: (batch, rows), or (batch),
// zero before
template <class T, bool kOfRows>
__global__ void __launch_bounds__(kThreads)
    amax_of_rows(const __grid_constant__ KernelInput x,
                 const __grid_constant__ Divisor blocks_of_matrix, std::uint32_t* out) {
  const std::uint32_t e = blocks_of_matrix.divide(blockIdx.x);
  const std::uint32_t row =
      (blockIdx.x - e * blocks_of_matrix.d) * (kThreads / 32) + threadIdx.x / 32;
  const std::uint32_t m = row < x.rows ? row_amax<T>(x, row_at<T>(x, e, row)) : 0;
  if (!kOfRows)
    raise_by_block(out + e, m);
  else if (row < x.rows && threadIdx.x % 32 == 0)
    out[e * x.rows + row] = m;
}
// Writes the amaxes of the rows of groups: warps take rows in turn, up to the last group's end.
template <class T>
__global__ void __launch_bounds__(kThreads)
    amax_of_group_rows(const __grid_constant__ KernelInput x, const std::int32_t* last_end,
                       std::uint32_t* out) {
  constexpr std::uint32_t kWarps = kThreads / 32;
  const std::uint32_t end = load_boundary(last_end, 0);
#pragma unroll 1
  for (std::uint32_t row = blockIdx.x * kWarps + threadIdx.x / 32; row < end;
       row += gridDim.x * kWarps) {
    const std::uint32_t m = row_amax<T>(x, row_of<T>(x, 0, row));
    if (threadIdx.x % 32 == 0) out[row] = m;
  }
}

// ---- Panels -------------------------------------------------------------------------------------
// The rows of 32 chunks that a block takes: a warp a row at a time.
inline constexpr int kPanel = 256;
// The outputs of a panel, zero before; null: not written.
struct PanelOutputs {
  std::uint32_t* columns;  // (batch, cols), or (groups, cols)
  std::uint32_t* rows;     // (batch, rows)
  std::uint32_t* tensor;   // (batch), or (groups)
};
// A panel, and the matrix or group that contains it.
struct Panel {
  std::uint32_t e;      // the matrix or group
  std::int64_t first;   // its first row, of x
  std::int64_t output;  // that row, of all rows
  int rows;
  std::uint32_t col;  // its first column
};
// Takes the amaxes of a panel.   kInGroup: its rows may lie anywhere
template <class T, bool kInGroup>
__device__ __forceinline__ void take_amax_of_panel(const KernelInput& x, const PanelOutputs& out,
                                                   const Panel& panel) {
  constexpr int kChunk = 16 / static_cast<int>(sizeof(T)), kColumns = 32 * kChunk;
  constexpr int kWarps = kThreads / 32;
  __shared__ uint4 of_warp[kWarps][32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const std::uint32_t e = panel.e;
  const std::int64_t col = std::int64_t{panel.col} + lane * kChunk;
  const int rows = panel.rows;
  const T* const from = row_at<T>(x, e, static_cast<std::uint32_t>(panel.first)) + col;
  const auto row_from = [&](int r) {
    if constexpr (kInGroup)
      if (x.rows_from) return row_of<T>(x, e, static_cast<std::uint32_t>(panel.first + r)) + col;
    return from + r * x.row_stride;
  };
  uint4 m = {};
  const auto take = [&](const uint4& chunk, int r) {
    m.x = max_words<T>(m.x, chunk.x), m.y = max_words<T>(m.y, chunk.y);
    m.z = max_words<T>(m.z, chunk.z), m.w = max_words<T>(m.w, chunk.w);
    if (!out.rows) return;
    const std::uint32_t row = warp_max(larger_half<T>(max_chunk<T>(0, chunk)));
    if (lane == 0) atomicMax(out.rows + panel.output + r, row);
  };
  constexpr int kTogether = 8;  // rows in flight
  int r = warp;
  if (x.aligned && col - lane * kChunk + kColumns <= x.cols) {
    const auto load = [&](int at) { return __ldg(reinterpret_cast<const uint4*>(row_from(at))); };
#pragma unroll 1
    for (; r < rows; r += kTogether * kWarps) {
      uint4 chunks[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        if (r + i * kWarps < rows) chunks[i] = load(r + i * kWarps);
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        if (r + i * kWarps < rows) take(chunks[i], r + i * kWarps);
    }
  }
#pragma unroll 1
  for (; r < rows; r += kWarps) {
    T elements[kChunk] = {};
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      if (col + i < x.cols) elements[i] = row_from(r)[i];
    uint4 chunk;
    memcpy(&chunk, elements, sizeof chunk);
    take(chunk, r);
  }
  if (out.tensor) raise_by_block(out.tensor + e, larger_half<T>(max_chunk<T>(0, m)));
  if (!out.columns) return;
  of_warp[warp][lane] = m;
  __syncthreads();
  if (threadIdx.x >= 128) return;  // a thread a word
  const std::uint32_t* words = &of_warp[0][0].x + threadIdx.x;
  std::uint32_t all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) all = max_words<T>(all, words[w * 128]);
  constexpr int kOfWord = 4 / static_cast<int>(sizeof(T));
  const std::int64_t panel_first = std::int64_t{panel.col} + threadIdx.x * kOfWord;
#pragma unroll
  for (int i = 0; i < kOfWord; ++i)
    if (panel_first + i < x.cols)
      atomicMax(out.columns + e * x.cols + panel_first + i,
                kOfWord == 1 ? all : (i == 0 ? all << 16 : all & 0xFFFF'0000u));
}

template <class T>
inline constexpr std::int64_t kPanelColumns = 32 * 16 / sizeof(T);
template <class T>
__global__ void __launch_bounds__(kThreads)
    amax_of_panels(const __grid_constant__ KernelInput x,
                   const __grid_constant__ PanelOutputs out) {
  constexpr auto kColumns = static_cast<std::uint32_t>(kPanelColumns<T>);
  const std::uint32_t across = static_cast<std::uint32_t>((x.cols + kColumns - 1) / kColumns);
  const std::uint32_t down = static_cast<std::uint32_t>((x.rows + kPanel - 1) / kPanel);
  const std::uint32_t panel = blockIdx.x / across, e = panel / down;
  const std::int64_t first = static_cast<std::int64_t>(panel - e * down) * kPanel;
  take_amax_of_panel<T, false>(
      x, out,
      {e, first, e * x.rows + first, static_cast<int>(min(x.rows - first, std::int64_t{kPanel})),
       (blockIdx.x - panel * across) * kColumns});
}
// Takes panels of groups: a tile's rows. Blocks past the last group leave at once.
template <class T>
__global__ void __launch_bounds__(kThreads)
    amax_of_group_panels(const __grid_constant__ KernelInput x,
                         const __grid_constant__ PanelOutputs out,
                         const __grid_constant__ DeviceGroups groups,
                         const __grid_constant__ TileOrder order) {
  const TileOrder::Tile panel = order.tile(blockIdx.x);
  const std::uint32_t tile = panel.row * kTile;
  if (tile >= load_boundary(groups.tiles, groups.count)) return;
  const GroupPlace group = find_group(groups, tile);
  const std::uint32_t in_group = tile - group.first_tile;
  if (in_group >= group.rows) return;  // of a group without rows
  take_amax_of_panel<T, true>(x, out,
                              {group.group, group.begin + in_group, group.begin + in_group,
                               static_cast<int>(min(group.rows - in_group, std::uint32_t{kTile})),
                               panel.col * static_cast<std::uint32_t>(kPanelColumns<T>)});
}

template <class T>
void launch_group_panels(const TensorRef& x, const PanelOutputs& out, cudaStream_t stream) {
  const KernelInput source = kernel_input(x);
  const std::int64_t across = ceil_div<std::int64_t>(x.cols, kPanelColumns<T>);
  const std::int64_t down = ceil_div<std::int64_t>(x.rows, kTile) + x.groups.count;
  amax_of_group_panels<T><<<grid_of(down * across, "amax"), kThreads, 0, stream>>>(
      source, out, device_groups(x.groups), tile_order(source, down, across));
  check_launch("amax");
}
template <class T>
void launch_panels(const TensorRef& x, const PanelOutputs& out, cudaStream_t stream) {
  if (x.groups) return launch_group_panels<T>(x, out, stream);
  const std::int64_t blocks = x.batch * ceil_div<std::int64_t>(x.rows, kPanel) *
                              ceil_div<std::int64_t>(x.cols, kPanelColumns<T>);
  amax_of_panels<T><<<grid_of(blocks, "amax"), kThreads, 0, stream>>>(kernel_input(x), out);
  check_launch("amax");
}

// Returns matrices without gaps between their rows as longer rows, of a length that suits a warp.
template <class T>
KernelInput lines_of(const KernelInput& x) {
  constexpr std::int64_t kLine = 16 * 1024 / sizeof(T);
  const std::int64_t size = x.rows * x.cols;
  if ((x.rows > 1 && x.row_stride != x.cols) || size % kLine != 0) return x;
  KernelInput lines = x;
  lines.rows = size / kLine, lines.cols = lines.row_stride = kLine;
  return lines;
}

template <class T>
void launch_amax(const AmaxRequest& r) {
  const KernelInput x = kernel_input(r.x);
  constexpr std::int64_t kWarps = kThreads / 32;
  if (r.of.spec.transform > 0) return launch_transformed(r);
  if (r.of.spec.has_row_amax() && r.of.columnwise)
    return launch_panels<T>(r.x, {r.out, nullptr, nullptr}, r.stream);
  if (!r.of.spec.has_row_amax() && (r.x.groups || (x.aligned && x.cols % kPanelColumns<T> == 0)))
    return launch_panels<T>(r.x, {nullptr, nullptr, r.out}, r.stream);
  if (r.x.groups) {
    const auto kernel = amax_of_group_rows<T>;
    const unsigned grid = resident_grid(kernel, ceil_div(x.rows, kWarps), 0, "amax");
    kernel<<<grid, kThreads, 0, r.stream>>>(x, last_end_of(r.x.groups), r.out);
    return check_launch("amax");
  }
  const KernelInput lines = r.of.spec.has_row_amax() ? x : lines_of<T>(x);
  const Divisor blocks_of_matrix(ceil_div(lines.rows, kWarps));
  const unsigned grid = grid_of(r.x.batch * blocks_of_matrix.d, "amax");
  const auto kernel = r.of.spec.has_row_amax() ? amax_of_rows<T, true> : amax_of_rows<T, false>;
  kernel<<<grid, kThreads, 0, r.stream>>>(lines, blocks_of_matrix, r.out);
  check_launch("amax");
}

// Clears `count` amaxes; those of rows, up to the last group's end.
__global__ void clear_rows(float* out, std::int64_t count, const std::int32_t* last_end) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count && i < *last_end) out[i] = 0.0f;
}
void clear(float* out, std::int64_t count, const std::int32_t* last_end, cudaStream_t stream) {
  if (count == 0) return;
  if (last_end) {
    clear_rows<<<grid_of(ceil_div<std::int64_t>(count, kThreads), "amax"), kThreads, 0, stream>>>(
        out, count, last_end);
    return check_launch("amax");
  }
  check(cudaMemsetAsync(out, 0, static_cast<std::size_t>(count) * sizeof(float), stream), "amax");
}

}  // namespace

void amax(const TensorRef& x, const AmaxOf& of, float* out, const Execution& execution) {
  const Spec& spec = of.spec;
  const bool columnwise = of.columnwise;
  const bool is_of_rows = spec.has_row_amax() && !columnwise;
  const std::int64_t parts = x.groups && !is_of_rows ? x.groups.count : x.batch;
  const std::int64_t count = parts * (spec.has_row_amax() ? (columnwise ? x.cols : x.rows) : 1);
  if (count == 0) return;
  const cudaStream_t stream = cuda_stream(execution);
  const bool by_rows = is_of_rows && spec.transform == 0;
  if (!by_rows || x.cols == 0)
    clear(out, count, is_of_rows ? last_end_of(x.groups) : nullptr, stream);
  if (x.rows * x.cols == 0) return;
  const AmaxRequest request = {x, of, reinterpret_cast<std::uint32_t*>(out), stream};
  x.dtype == DType::kFloat32 ? launch_amax<float>(request) : launch_amax<Bf16>(request);
}

void amax_of_rows_and_columns(const TensorRef& x, float* of_rows, float* of_columns,
                              const Execution& execution) {
  const cudaStream_t stream = cuda_stream(execution);
  clear(of_rows, x.batch * x.rows, last_end_of(x.groups), stream);
  clear(of_columns, (x.groups ? x.groups.count : x.batch) * x.cols, nullptr, stream);
  if (x.rows * x.cols == 0) return;
  auto* rows = reinterpret_cast<std::uint32_t*>(of_rows);
  auto* columns = reinterpret_cast<std::uint32_t*>(of_columns);
  const PanelOutputs out = {columns, rows, nullptr};
  x.dtype == DType::kFloat32 ? launch_panels<float>(x, out, stream)
                             : launch_panels<Bf16>(x, out, stream);
}

void amax_of_values_and_columns(const TensorRef& x, const AmaxOf& columns, float* of_values,
                                float* of_columns, const Execution& execution) {
  const cudaStream_t stream = cuda_stream(execution);
  clear(of_values, 1, nullptr, stream);
  clear(of_columns, 1, nullptr, stream);
  if (x.rows * x.cols == 0) return;
  AmaxesOfRows to = {};
  to.untransformed.tensor = reinterpret_cast<std::uint32_t*>(of_values);
  to.transformed = &columns;
  to.of_transformed = reinterpret_cast<std::uint32_t*>(of_columns);
  amaxes_of_rows(x, to, execution);
}

void amaxes_of_rows(const TensorRef& x, const AmaxesOfRows& of, const Execution& execution) {
  const cudaStream_t stream = cuda_stream(execution);
  if (of.transformed)
    return launch_transformed({.x = x,
                               .of = *of.transformed,
                               .out = of.of_transformed,
                               .stream = stream,
                               .rows = of.columns,
                               .untransformed = of.untransformed});
  launch_panels<Bf16>(x, {of.columns, of.untransformed.rows, of.untransformed.tensor}, stream);
}

}  // namespace minifloat::cuda
