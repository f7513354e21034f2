// Rowwise casts with a scale a row, from one read of x: a team of threads holds a row in registers,
// computes its amax, and casts the row. A team is a warp, or for long rows a block.
//
//     bytes an element: 2 or 4 of x, 1 of codes
//
// A weight that backward casts columnwise needs the amaxes of its columns too. Each thread of a
// team has the same columns of every row, so that the same read finds those.
#include "cuda/quantize/column_amaxes.cuh"
#include "cuda/quantize/general.cuh"

namespace minifloat::cuda {
namespace {

struct NoColumns {
  template <class T>
  __device__ __forceinline__ void take(int, const Vec16<T>&) {}
};

// Returns the largest bit pattern of a team. `turn` alternates between calls, so that one barrier a
// call suffices.
template <int kTeam>
__device__ __forceinline__ std::uint32_t max_of_team(std::uint32_t m, unsigned turn) {
  m = __reduce_max_sync(kAllLanes, m);
  if constexpr (kTeam > kWarp) {
    constexpr unsigned kWarps = kTeam / kWarp;
    __shared__ std::uint32_t of_warp[2][kWarps];
    if (threadIdx.x % kWarp == 0) of_warp[turn % 2][threadIdx.x / kWarp] = m;
    __syncthreads();
    m = __reduce_max_sync(kAllLanes, of_warp[turn % 2][threadIdx.x % kWarps]);
  }
  return m;
}

// Casts row `at.row` of x, by all threads of the team.
template <class T, int kTeam, int kVecs, class Columns>
__device__ __forceinline__ void cast_whole_row(const KernelInput& x, const KernelOperand& plan,
                                               Place at, unsigned turn, Columns& columns) {
  const unsigned thread = threadIdx.x % kTeam;
  const T* row = row_of<T>(x, at.batch, at.row);
  const auto col_of = [&](int i) { return (thread + i * kTeam) * kVec; };

  // ---- The amax of the row
  Vec16<T> vecs[kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i)
    vecs[i] = col_of(i) < plan.padded ? load_vec<T>(x, row, col_of(i)) : Vec16<T>{};
  std::uint32_t m = 0;
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    m = max(m, vecs[i].amax());
    columns.take(i, vecs[i]);
  }
  m = max_of_team<kTeam>(m, turn);

  // ---- Cast
  const Window window = {plan.rows, plan.padded, 0, 0, 0};
  if (thread == 0) store_whole<E4M3>(plan, at.all, bit_cast<float>(m));
  const BlockScale block = block_scale<E4M3>(ScaleRule::kRow, plan.rounding, {}, m);
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    at.col = col_of(i);
    if (at.col >= plan.padded) break;
    const Codes<E4M3> codes =
        encode_in_block<E4M3, false>(plan, ScaleRule::kRow, vecs[i], block, {});
    store_codes<E4M3>(plan, window, codes, at);
    if (plan.decoded) store_decoded<E4M3>(plan, window, codes, block.scale, at);
  }
}

// ---- Rows ---------------------------------------------------------------------------------------
template <class T, int kTeam, int kVecs>
__global__ void __launch_bounds__(kThreads, 16 / (kVecs + 1))
    quantize_whole_rows(const __grid_constant__ KernelInput x,
                        const __grid_constant__ KernelOperand plan,
                        const __grid_constant__ Divisor rows_of_matrix, std::uint32_t rows) {
  Place at = {};
  at.all = at.line = blockIdx.x * (kThreads / kTeam) + threadIdx.x / kTeam;
  if (at.all >= rows) return;
  at.batch = rows_of_matrix.divide(at.all);
  at.row = at.all - at.batch * rows_of_matrix.d;
  NoColumns none;
  cast_whole_row<T, kTeam, kVecs>(x, plan, at, 0, none);
}
// Casts rows of groups: teams take rows in turn, up to the last group's end.
template <class T, int kTeam, int kVecs>
__global__ void __launch_bounds__(kThreads, 16 / (kVecs + 1))
    quantize_whole_rows_of_groups(const __grid_constant__ KernelInput x,
                                  const __grid_constant__ KernelOperand plan,
                                  const std::int32_t* last_end) {
  constexpr std::uint32_t kTeams = kThreads / kTeam;
  const std::uint32_t end = load_boundary(last_end, 0);
  NoColumns none;
  unsigned turn = 0;
#pragma unroll 1
  for (std::uint32_t row = blockIdx.x * kTeams + threadIdx.x / kTeam; row < end;
       row += gridDim.x * kTeams)
    cast_whole_row<T, kTeam, kVecs>(x, plan, {0, row, row, 0, row}, turn++, none);
}

// ---- Rows, and the amaxes of columns ------------------------------------------------------------
inline constexpr std::uint32_t kRowsOfBlock = 64;

// A block casts kRowsOfBlock rows of a matrix.   columns: (batch, cols), zero before
template <int kTeam, int kVecs>
__global__ void __launch_bounds__(kThreads, kVecs < 4 ? 3 : 2)
    quantize_rows_and_amaxes_of_columns(const __grid_constant__ KernelInput x,
                                        const __grid_constant__ KernelOperand plan,
                                        const __grid_constant__ Divisor blocks_of_matrix,
                                        std::uint32_t* columns) {
  const std::uint32_t batch = blocks_of_matrix.divide(blockIdx.x);
  const std::uint32_t first = (blockIdx.x - batch * blocks_of_matrix.d) * kRowsOfBlock;
  const std::uint32_t end = min(first + kRowsOfBlock, plan.rows);
  ColumnAmaxes<kVecs> of_thread;
  unsigned turn = 0;
#pragma unroll 1
  for (std::uint32_t row = first + threadIdx.x / kTeam; row < end; row += kThreads / kTeam) {
    const std::uint32_t all = batch * plan.rows + row;
    cast_whole_row<Bf16, kTeam, kVecs>(x, plan, {batch, row, all, 0, all}, turn++, of_thread);
  }
  __shared__ SharedColumns<kTeam, kVecs> shared;
  raise_columns(of_thread, shared, x.cols, columns + std::uint64_t{batch} * x.cols);
}

// ---- Launches -----------------------------------------------------------------------------------
template <class T, int kTeam, int kVecs>
void launch(const QuantizeArgs& args, const Execution& execution) {
  const cudaStream_t stream = cuda_stream(execution);
  constexpr std::int64_t kTeams = kThreads / kTeam;
  const std::int64_t rows = args.batch * args.x.rows, blocks = ceil_div(rows, kTeams);
  if (args.groups) {
    const auto kernel = quantize_whole_rows_of_groups<T, kTeam, kVecs>;
    kernel<<<resident_grid(kernel, blocks, 0, "quantize"), kThreads, 0, stream>>>(
        args.x, args.row, args.groups.rows + args.groups.count);
  } else {
    quantize_whole_rows<T, kTeam, kVecs><<<grid_of(blocks, "quantize"), kThreads, 0, stream>>>(
        args.x, args.row, Divisor(args.x.rows), static_cast<std::uint32_t>(rows));
  }
  check_launch("quantize");
}

template <int kTeam, int kVecs>
void launch_with_columns(const QuantizeArgs& args, const Execution& execution) {
  const cudaStream_t stream = cuda_stream(execution);
  std::uint32_t* const columns = cleared_columns(args, args.batch, stream);
  const Divisor blocks(ceil_div<std::int64_t>(args.x.rows, kRowsOfBlock));
  quantize_rows_and_amaxes_of_columns<kTeam, kVecs>
      <<<grid_of(args.batch * blocks.d, "quantize"), kThreads, 0, stream>>>(args.x, args.row,
                                                                            blocks, columns);
  check_launch("quantize");
}

// Returns launch_of.operator()<kTeam, kVecs>() for the threads of a team and the vec16s of a thread
// that hold a row; null for longer rows.
template <class LaunchOf>
LaunchCast find_for_rows_of(std::int64_t cols, const LaunchOf& launch_of) {
  const std::int64_t vecs = ceil_div<std::int64_t>(cols, kVec);
  LaunchCast found = nullptr;
  const auto take = [&]<int kTeam, int kVecs>() {
    if (vecs > kTeam * kVecs) return false;
    found = launch_of.template operator()<kTeam, kVecs>();
    return true;
  };
  return take.template operator()<kWarp, 1>() || take.template operator()<kWarp, 2>() ||
                 take.template operator()<kWarp, 4>() || take.template operator()<kThreads, 1>() ||
                 take.template operator()<kThreads, 2>() || take.template operator()<kThreads, 4>()
             ? found
             : nullptr;
}

bool fits(const Spec& spec) {
  return spec.rule == ScaleRule::kRow && !spec.stochastic && spec.transform == 0;
}

}  // namespace

LaunchCast find_whole_rows(const QuantizeArgs& args) {
  if (!fits(args.row_spec)) return nullptr;
  return find_for_rows_of(args.x.cols, [&]<int kTeam, int kVecs>() -> LaunchCast {
    return args.is_bf16 ? launch<Bf16, kTeam, kVecs> : launch<float, kTeam, kVecs>;
  });
}

LaunchCast find_rows_and_amaxes_of_columns(const QuantizeArgs& args) {
  if (!fits(args.row_spec) || !args.is_bf16 || args.groups) return nullptr;
  return find_for_rows_of(args.x.cols, [&]<int kTeam, int kVecs>() -> LaunchCast {
    return launch_with_columns<kTeam, kVecs>;
  });
}

}  // namespace minifloat::cuda
