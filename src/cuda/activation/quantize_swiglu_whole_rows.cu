// Rowwise casts of h with a scale a row: a warp, or for long rows a block, computes a row into
// shared memory and finds its amax, then casts it. Of groups, also the amaxes of the columns that
// backward's cast of h scales by.
//
//     bytes an element of h: 2 + 2 of gate and up, 1 of codes
#include <algorithm>

#include "cuda/activation/quantize_swiglu.h"
#include "cuda/activation/swiglu.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/quantize/column_amaxes.cuh"
#include "cuda/quantize/general.cuh"

namespace minifloat::cuda {
namespace {

constexpr unsigned kWarps = kThreads / 32;
// The most vec16s of a lane, where a warp takes a row. A block's threads take up to twice as many.
constexpr int kMostVecs = 4;

struct WholeRowArgs {
  SwiGluArgs of;
  KernelOperand plan;
  std::uint32_t vecs;  // of a row
};

// Returns the largest of a row's bit patterns. What its threads wrote before can be read after.
template <bool kByWarps>
__device__ __forceinline__ std::uint32_t max_of_row(std::uint32_t m) {
  m = warp_max(m);
  if constexpr (!kByWarps) {
    __shared__ std::uint32_t of_warp[kWarps];
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = m;
    __syncthreads();
    m = warp_max(of_warp[threadIdx.x % kWarps]);
  } else {
    __syncwarp();
  }
  return m;
}

// Computes a row into `of_row`, in shared memory, and casts it, by a warp or all threads of the
// block.   kVecs: of a thread, at most; 0: not known.   take: is passed each, after its number
template <bool kByWarps, int kVecs, class Take>
__device__ __forceinline__ void cast_row(const WholeRowArgs& args, std::uint32_t row, uint4* of_row,
                                         Take take) {
  constexpr std::uint32_t kThreadsOfRow = kByWarps ? 32 : kThreads;
  const SwiGluArgs& of = args.of;
  const KernelOperand& plan = args.plan;
  const std::uint32_t thread = threadIdx.x % kThreadsOfRow;
  // Chunks of 8 columns, in an order by which neighbouring vec16s lie in different banks.
  const auto chunk_at = [&](std::uint32_t i) -> uint4& { return of_row[i ^ (i / 8 % 2)]; };

  // ---- The row, and its amax
  const float weight = of.weight_at(of.place_of(row));
  std::uint32_t m = 0;
#pragma unroll 1
  for (std::uint32_t i = thread; i < 2 * args.vecs; i += kThreadsOfRow) {
    const Vec8<Bf16> h = h_of(of, load_gate_and_up(of, row, i * kSwiGluVec), weight);
    m = max(m, amax_of(h));
    h.store(reinterpret_cast<Bf16*>(&chunk_at(i)));
  }
  m = max_of_row<kByWarps>(m);

  // ---- Cast
  const Window window = {plan.rows, plan.padded, 0, 0, 0};
  Place at = {0, row, row, 0, row};
  if (thread == 0) store_whole<E4M3>(plan, row, bit_cast<float>(m));
  const BlockScale block = block_scale<E4M3>(ScaleRule::kRow, plan.rounding, {}, m);
  const auto cast = [&](unsigned i) {
    const std::uint32_t vec = thread + i * kThreadsOfRow;
    if (vec >= args.vecs) return;
    Vec16<Bf16> h;
#pragma unroll
    for (unsigned c = 0; c < 2; ++c) reinterpret_cast<uint4*>(&h)[c] = chunk_at(2 * vec + c);
    take(i, h);
    at.col = vec * kVec;
    const Codes<E4M3> codes = encode_in_block<E4M3, false>(plan, ScaleRule::kRow, h, block, {});
    store_codes<E4M3>(plan, window, codes, at);
    if (plan.decoded) store_decoded<E4M3>(plan, window, codes, block.scale, at);
  };
  if constexpr (kVecs > 0) {
#pragma unroll
    for (unsigned i = 0; i < kVecs; ++i) cast(i);
  } else {
#pragma unroll 1
    for (unsigned i = 0; i * kThreadsOfRow < args.vecs; ++i) cast(i);
  }
}

template <bool kByWarps>
__global__ void __launch_bounds__(kThreads, 5)
    quantize_swiglu_whole_rows(const __grid_constant__ WholeRowArgs args) {
  constexpr std::uint32_t kThreadsOfRow = kByWarps ? 32 : kThreads;
  extern __shared__ __align__(16) uint4 chunks[];
  const std::uint32_t end = args.of.last_end ? load_boundary(args.of.last_end, 0)
                                             : static_cast<std::uint32_t>(args.of.rows);
  const std::uint32_t row = blockIdx.x * (kThreads / kThreadsOfRow) + threadIdx.x / kThreadsOfRow;
  if (row >= end) return;
  uint4* const of_row = chunks + (kByWarps ? threadIdx.x / 32 * args.vecs * 2 : 0);
  cast_row<kByWarps, 0>(args, row, of_row, [](unsigned, const Vec16<Bf16>&) {});
}

// Casts rows of groups, and finds the amaxes of their columns: a block takes a tile's rows of one
// group, and a warp a row at a time.   columns: (groups, width), zero before
template <int kVecs>
__global__ void __launch_bounds__(kThreads, kVecs < 4 ? 4 : 2)
    quantize_swiglu_rows_and_amaxes_of_columns(const __grid_constant__ WholeRowArgs args,
                                               const __grid_constant__ DeviceGroups groups,
                                               std::uint32_t* columns) {
  extern __shared__ __align__(16) uint4 chunks[];
  const std::uint32_t tile = blockIdx.x * kTile;
  if (tile >= load_boundary(groups.tiles, groups.count)) return;
  const GroupPlace group = find_group(groups, tile);
  const std::uint32_t first = tile - group.first_tile,
                      end = min(first + std::uint32_t{kTile}, group.rows);
  uint4* const of_row = chunks + threadIdx.x / 32 * args.vecs * 2;
  ColumnAmaxes<kVecs> of_thread;
#pragma unroll 1
  for (std::uint32_t row = first + threadIdx.x / 32; row < end; row += kWarps) {
    cast_row<true, kVecs>(args, group.begin + row, of_row,
                          [&](unsigned i, const Vec16<Bf16>& h) { of_thread.take(i, h); });
    __syncwarp();  // the next row uses the same shared memory
  }
  const auto width = static_cast<std::uint32_t>(args.of.width);
  __syncthreads();
  raise_columns(of_thread, *reinterpret_cast<SharedColumns<kWarp, kVecs>*>(chunks), width,
                columns + std::uint64_t{group.group} * width);
}

WholeRowArgs args_of(const SwiGluArgs& of, const QuantizeArgs& args) {
  return {of, args.row, static_cast<std::uint32_t>(of.width / kVec)};
}

template <bool kByWarps>
void launch(const SwiGluArgs& of, const QuantizeArgs& cast, const Execution& execution) {
  const WholeRowArgs args = args_of(of, cast);
  const auto kernel = quantize_swiglu_whole_rows<kByWarps>;
  constexpr std::int64_t kThreadsOfRow = kByWarps ? 32 : kThreads;
  const std::int64_t blocks = ceil_div<std::int64_t>(args.of.rows * kThreadsOfRow, kThreads);
  const std::size_t bytes = std::size_t{args.vecs} * kThreads / kThreadsOfRow * sizeof(Vec16<Bf16>);
  allow_shared(kernel, bytes, "quantize_swiglu");
  kernel<<<grid_of(blocks, "quantize_swiglu"), kThreads, bytes, cuda_stream(execution)>>>(args);
  check_launch("quantize_swiglu");
}

template <int kVecs>
void launch_with_columns(const SwiGluArgs& of, const QuantizeArgs& args,
                         const Execution& execution) {
  const WholeRowArgs all = args_of(of, args);
  const cudaStream_t stream = cuda_stream(execution);
  const auto kernel = quantize_swiglu_rows_and_amaxes_of_columns<kVecs>;
  const std::int64_t blocks = ceil_div<std::int64_t>(all.of.rows, kTile) + args.groups.count;
  const std::size_t bytes = std::max(std::size_t{all.vecs} * kWarps * sizeof(Vec16<Bf16>),
                                     sizeof(SharedColumns<kWarp, kVecs>));
  std::uint32_t* const columns = cleared_columns(args, args.groups.count, stream);
  allow_shared(kernel, bytes, "quantize_swiglu");
  kernel<<<grid_of(blocks, "quantize_swiglu"), kThreads, bytes, stream>>>(all, args.groups,
                                                                          columns);
  check_launch("quantize_swiglu");
}

bool fits(const QuantizeArgs& args) {
  const Spec& spec = args.row_spec;
  return spec.has_row_amax() && !args.row.amax && spec.elements == Elements::kE4m3 &&
         !spec.stochastic && spec.transform == 0;
}

}  // namespace

LaunchSwiGluCast find_swiglu_rows_and_amaxes_of_columns(const QuantizeArgs& args) {
  if (!fits(args) || !args.groups) return nullptr;
  const std::int64_t vecs = args.x.cols / kVec;
  if (vecs <= kWarp) return launch_with_columns<1>;
  if (vecs <= kWarp * 2) return launch_with_columns<2>;
  return vecs <= kWarp * kMostVecs ? launch_with_columns<kMostVecs> : nullptr;
}

LaunchSwiGluCast find_swiglu_whole_rows(const QuantizeArgs& args) {
  if (!fits(args)) return nullptr;
  const std::int64_t vecs = args.x.cols / kVec;
  if (vecs <= 32 * kMostVecs) return launch<true>;
  return vecs <= kThreads * 2 * kMostVecs ? launch<false> : nullptr;
}

}  // namespace minifloat::cuda
