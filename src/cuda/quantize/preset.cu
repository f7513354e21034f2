// The preset kernels: bf16, sizes of whole vec16s or tiles, scales rounded as by presets. All other
// casts are general.cuh's.
#include <algorithm>

#include "cuda/quantize/preset.cuh"

namespace minifloat::cuda {
namespace {

// ---- By rows ------------------------------------------------------------------------------------
// A matrix without gaps, as one run of vec16s.
struct VecRun {
  const uint4* x;
  std::uint32_t count;
  Divisor vecs_of_row;
};

// Returns vec16 u; zeros past the end.
__device__ __forceinline__ Vec16<Bf16> load_vec(const VecRun& run, std::uint32_t u) {
  Vec16<Bf16> vec = {};
  if (u >= run.count) return vec;
  const uint4* from = run.x + std::uint64_t{u} * 2;
  *reinterpret_cast<uint4*>(&vec) = __ldg(from);
  *(reinterpret_cast<uint4*>(&vec) + 1) = __ldg(from + 1);
  return vec;
}

// Casts vec16 u.   to: its codes
template <class C>
__device__ __forceinline__ void cast_vec(const VecRun& run, const KernelOperand& plan,
                                         const Whole& whole, const MatrixScale& scale,
                                         const Vec16<Bf16>& vec, std::uint32_t u,
                                         std::uint8_t* to) {
  const Transformed16 transformed = transform_preset<C>(vec);
  const std::uint32_t amax = C::kBlocks ? amax_of_lanes(transformed.amax, C::kVecsLog2) : 0;
  if (u >= run.count) return;  // its lane took part in the exchange
  const BlockScale block = scale_of_vec<C>(C::kRule, C::kRounding, scale, amax, transformed.vec);
  if constexpr (C::kBlocks)
    if (u % (1 << C::kVecsLog2) == 0) store_scale_at(plan, C::kRule, block, u >> C::kVecsLog2);
  RandomBits bits = {};
  if constexpr (C::kStochastic) {
    const std::uint32_t row = run.vecs_of_row.divide(u);
    bits = random_bits_at(whole, row, u - row * run.vecs_of_row.d);
  }
  encode_and_store<C>(plan, transformed, block, bits, to, u);
}

template <class C>
__global__ void __launch_bounds__(kThreads, 4)
    quantize_run(const __grid_constant__ VecRun run, const __grid_constant__ KernelOperand plan) {
  __shared__ Whole whole;
  const std::uint32_t first = blockIdx.x * (kThreads * kVecsOfRows) + threadIdx.x;
  constexpr int kStep = kThreads * kVecBytes<typename C::F>;
  std::uint8_t* const to = plan.codes + std::uint64_t{first} * kVecBytes<typename C::F>;
  if constexpr (C::kReadsValues) {
    // One copy of the body, with the next load in flight: four do not fit the instruction cache.
    Vec16<Bf16> next = load_vec(run, first);
    if (threadIdx.x == 0) prepare<C>(plan, whole);
    __syncthreads();
    const MatrixScale scale = scale_of_whole<C>(plan, whole);
#pragma unroll 1
    for (int i = 0; i < kVecsOfRows; ++i) {
      const Vec16<Bf16> vec = next;
      const std::uint32_t u = first + i * kThreads;
      if (i + 1 < kVecsOfRows) next = load_vec(run, u + kThreads);
      cast_vec<C>(run, plan, whole, scale, vec, u, to + i * kStep);
    }
  } else {
    Vec16<Bf16> vecs[kVecsOfRows];
#pragma unroll
    for (int i = 0; i < kVecsOfRows; ++i) vecs[i] = load_vec(run, first + i * kThreads);
    if (threadIdx.x == 0) prepare<C>(plan, whole);
    __syncthreads();
    const MatrixScale scale = scale_of_whole<C>(plan, whole);
    std::uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kVecsOfRows; ++i) {
      cast_vec<C>(run, plan, whole, scale, vecs[i], first + i * kThreads, to + i * kStep);
      if constexpr (kFindsCurrentAmax<C>)
        if (plan.current_amax) largest = max(largest, vecs[i].amax());
    }
    if constexpr (kFindsCurrentAmax<C>) raise_current_amax(plan, largest);
  }
}

template <class C>
void launch_run(const QuantizeArgs& args, const Execution& execution) {
  const std::int64_t of_row = args.x.cols / kVec, count = args.x.rows * of_row;
  const VecRun run = {static_cast<const uint4*>(args.x.data), static_cast<std::uint32_t>(count),
                      Divisor(of_row)};
  const unsigned grid = grid_of(ceil_div<std::int64_t>(count, kThreads * kVecsOfRows), "quantize");
  quantize_run<C><<<grid, kThreads, 0, cuda_stream(execution)>>>(run, args.row);
  check_launch("quantize");
}

// ---- By tiles -----------------------------------------------------------------------------------
// Casts one direction of a tile.   kHasAmaxes: `amaxes_2d` holds the amaxes of the 2D blocks,
// computed by the other direction
template <class C, bool kTransposed, bool kHasAmaxes>
__device__ __forceinline__ void cast_whole_tile(const KernelOperand& plan, const Whole& whole,
                                                const SharedTile<Bf16>& shared,
                                                const TilePlace& tile, std::uint32_t* amaxes_2d) {
  std::uint32_t largest = 0;
  using F = typename C::F;
  if constexpr (C::kIsBlock2d && !kHasAmaxes)
    amax_of_blocks_2d<C, kTransposed>(plan, shared, amaxes_2d);
  const MatrixScale scale = scale_of_whole<C>(plan, whole);
  const std::uint32_t vec_col = threadIdx.x % kVecColumns;
  const std::uint32_t col = (kTransposed ? tile.row : tile.col) / kVec + vec_col;  // in vec16s
  const std::uint32_t first = kTransposed ? tile.col : tile.row;
  std::uint8_t* const codes =
      plan.codes + std::uint64_t{first} * plan.code_pitch + col * kVecBytes<F>;
  const bool is_first_col = col % (1 << C::kVecsLog2) == 0;  // of a block
  const std::uint64_t first_scale =
      std::uint64_t{first >> C::kHeightLog2} * plan.scale_cols + (col >> C::kVecsLog2);
  shared.template each_vec<kTransposed>([&](const auto& vec, unsigned tile_row) {
    const Transformed16 transformed = transform_preset<C>(vec);
    const std::uint32_t row = first + tile_row;
    std::uint32_t amax = 0;
    if constexpr (C::kIsBlock2d) {
      amax = amaxes_2d[block_2d_of(plan, tile_row, vec_col, kHasAmaxes)];
    } else if constexpr (C::kBlocks) {
      amax = amax_of_lanes(transformed.amax, C::kVecsLog2);
    } else if constexpr (C::kRule == ScaleRule::kRow) {
      const float active_amax = plan.amax[row];
      amax = magnitude_bits(active_amax);
      if (col == 0) store_whole<F>(plan, row, active_amax);
    }
    const BlockScale block = block_scale<F>(C::kRule, C::kRounding, scale, amax);
    if constexpr (C::kBlocks)
      if (is_first_col && tile_row % (1 << C::kHeightLog2) == 0)
        store_scale_at(plan, C::kRule, block,
                       first_scale + std::uint64_t{tile_row >> C::kHeightLog2} * plan.scale_cols);
    RandomBits bits = {};
    if constexpr (C::kStochastic) bits = random_bits_at(whole, row, col);
    encode_and_store<C>(plan, transformed, block, bits,
                        codes + std::uint64_t{tile_row} * plan.code_pitch,
                        std::uint64_t{row} * (plan.padded / kVec) + col);
    if constexpr (kFindsCurrentAmax<C>)
      if (plan.current_amax) largest = max(largest, transformed.vec.amax());
  });
  if constexpr (kFindsCurrentAmax<C>) raise_current_amax(plan, largest);
}

template <class C>
constexpr bool kHasBlocks2d = false;
template <class C>
  requires(C::kIsBlock2d)
constexpr bool kHasBlocks2d<C> = true;

// The minimum blocks per SM. Casts to 8 bits need fewer registers, and wait longer for memory.
template <class C>
constexpr int kBlocksOf = 5;  // also of an absent direction
template <class C>
  requires(C::F::kBits == 4)
constexpr int kBlocksOf<C> = 4;

template <class Row, class Col>
__global__ void __launch_bounds__(kThreads, std::min(kBlocksOf<Row>, kBlocksOf<Col>))
    quantize_whole_tile(const __grid_constant__ Source x, const __grid_constant__ KernelOperand row,
                        const __grid_constant__ KernelOperand col,
                        const __grid_constant__ Tiles tiles) {
  constexpr bool kRow = !std::is_same_v<Row, Absent>, kCol = !std::is_same_v<Col, Absent>;
  extern __shared__ __align__(16) std::uint32_t words[];
  __shared__ std::uint32_t amaxes_2d[kBlocks2d];
  __shared__ Whole whole[2];
  const TilePlace tile = tile_place(tiles);
  const SharedTile<Bf16> shared = {words};
  shared.fill<true>(x, tile);
  if constexpr (kRow)
    if (threadIdx.x == 0) prepare<Row>(row, whole[0]);
  if constexpr (kCol)
    if (threadIdx.x == 32) prepare<Col>(col, whole[1]);
  shared.wait();
  if constexpr (kRow) cast_whole_tile<Row, false, false>(row, whole[0], shared, tile, amaxes_2d);
  if constexpr (kCol) {
    constexpr bool kHasAmaxes = kHasBlocks2d<Row> && kHasBlocks2d<Col>;
    cast_whole_tile<Col, true, kHasAmaxes>(col, whole[1], shared, tile, amaxes_2d);
  }
}

template <class Row, class Col>
void launch_whole_tiles(const QuantizeArgs& args, const Execution& execution) {
  const Tiles tiles = tiles_of(args.x);
  quantize_whole_tile<Row, Col>
      <<<tile_grid(1, tiles, "quantize"), kThreads, SharedTile<Bf16>::kBytes,
         cuda_stream(execution)>>>(args.x, args.row, args.col, tiles);
  check_launch("quantize");
}

// ---- The table ----------------------------------------------------------------------------------
bool fits_preset(const Spec& spec, const KernelOperand& plan) {
  return plan.aligned &&
         (spec.transform == 0 || (spec.transform == kVec && plan.height_log2 == 0)) &&
         reinterpret_cast<std::uintptr_t>(plan.decoded) % 16 == 0;
}
template <class C>
bool try_run(const QuantizeArgs& args, const Execution& execution) {
  if (!is_of<C>(args.row_spec)) return false;
  launch_run<C>(args, execution);
  return true;
}
template <class C>
bool try_column(const QuantizeArgs& args, const Execution& execution) {
  if (!is_of<C>(args.col_spec)) return false;
  launch_whole_tiles<Absent, C>(args, execution);
  return true;
}
template <class Row, class Col = Row>
bool try_both(const QuantizeArgs& args, const Execution& execution) {
  if (!is_of<Row>(args.row_spec) || !is_of<Col>(args.col_spec)) return false;
  launch_whole_tiles<Row, Col>(args, execution);
  return true;
}

template <ScaleRule Rule, class F>
using Nearest = PresetCast<Rule, F, false, false>;
template <ScaleRule Rule, class F>
using Block2d = PresetCast<Rule, F, false, false, true>;

constexpr ScaleRule kTensor = ScaleRule::kTensor, kRow = ScaleRule::kRow,
                    kBlock = ScaleRule::kBlock;

// The preset casts to E2M1.
template <ScaleRule Rule, ScaleRounding Rounding = ScaleRounding::kDefault>
struct Fp4 {
  using Straight = PresetCast<Rule, E2M1, false, false, false, Rounding>;
  using Block2d = PresetCast<Rule, E2M1, false, false, true, Rounding>;
  using Transformed = PresetCast<Rule, E2M1, false, true, false, Rounding>;
  using Random = PresetCast<Rule, E2M1, true, false, false, Rounding>;
  using TransformedRandom = PresetCast<Rule, E2M1, true, true, false, Rounding>;

  static bool row(const QuantizeArgs& args, const Execution& execution) {
    return try_run<Straight>(args, execution) || try_run<Random>(args, execution);
  }
  static bool column(const QuantizeArgs& args, const Execution& execution) {
    return try_column<Straight>(args, execution) || try_column<Transformed>(args, execution) ||
           try_column<TransformedRandom>(args, execution) || try_block_2d_column(args, execution);
  }
  static bool both(const QuantizeArgs& args, const Execution& execution) {
    return try_both<Straight>(args, execution) ||
           try_both<Straight, Transformed>(args, execution) ||
           try_both<Random, TransformedRandom>(args, execution) ||
           try_both<TransformedRandom>(args, execution) || try_block_2d_both(args, execution);
  }

 private:
  static constexpr bool kOffersBlocks2d = Rule == ScaleRule::kNvfp4;
  static bool try_block_2d_column(const QuantizeArgs& args, const Execution& execution) {
    if constexpr (kOffersBlocks2d) return try_column<Block2d>(args, execution);
    return false;
  }
  static bool try_block_2d_both(const QuantizeArgs& args, const Execution& execution) {
    if constexpr (kOffersBlocks2d) return try_both<Block2d>(args, execution);
    return false;
  }
};
using Mxfp4 = Fp4<ScaleRule::kMx>;
using Nvfp4 = Fp4<ScaleRule::kNvfp4>;
using Nvfp4Pow2 = Fp4<ScaleRule::kNvfp4, ScaleRounding::kPowerOfTwo>;
using Nvfp4FourOverSix =
    PresetCast<ScaleRule::kNvfp4, E2M1, false, false, false, ScaleRounding::kFourOverSix>;
using Mxfp8 = Nearest<ScaleRule::kMx, E4M3>;
using Mxfp8Block2d = Block2d<ScaleRule::kMx, E4M3>;

bool launch_row(const QuantizeArgs& args, const Execution& execution) {
  const std::int64_t block = std::max(args.row_spec.block_cols, kVec);
  const bool is_run = args.x.rows == 1 || args.x.row_stride == args.x.cols;
  if (!is_run || args.x.cols % block != 0 || args.row.height_log2 > 0 ||
      args.x.rows * args.x.cols / kVec >= (std::int64_t{1} << 31) - kThreads * kVecsOfRows)
    return false;
  return try_run<Nearest<kTensor, E4M3>>(args, execution) ||
         try_run<Nearest<kTensor, E5M2>>(args, execution) ||
         try_run<Nearest<kBlock, E4M3>>(args, execution) || try_run<Mxfp8>(args, execution) ||
         Mxfp4::row(args, execution) || Nvfp4::row(args, execution) ||
         Nvfp4Pow2::row(args, execution) || try_run<Nvfp4FourOverSix>(args, execution);
}
bool launch_column(const QuantizeArgs& args, const Execution& execution) {
  return try_column<Nearest<kTensor, E4M3>>(args, execution) ||
         try_column<Nearest<kTensor, E5M2>>(args, execution) ||
         try_column<Nearest<kRow, E4M3>>(args, execution) ||
         try_column<Nearest<kBlock, E4M3>>(args, execution) ||
         try_column<Block2d<kBlock, E4M3>>(args, execution) || try_column<Mxfp8>(args, execution) ||
         try_column<Mxfp8Block2d>(args, execution) || Mxfp4::column(args, execution) ||
         Nvfp4::column(args, execution) || Nvfp4Pow2::column(args, execution);
}
bool launch_row_and_column(const QuantizeArgs& args, const Execution& execution) {
  return try_both<Nearest<kTensor, E4M3>>(args, execution) ||
         try_both<Nearest<kTensor, E5M2>>(args, execution) ||
         try_both<Nearest<kRow, E4M3>>(args, execution) ||
         try_both<Nearest<kBlock, E4M3>>(args, execution) ||
         try_both<Block2d<kBlock, E4M3>>(args, execution) || try_both<Mxfp8>(args, execution) ||
         try_both<Mxfp8Block2d>(args, execution) || Mxfp4::both(args, execution) ||
         Nvfp4::both(args, execution) || Nvfp4Pow2::both(args, execution);
}

}  // namespace

bool launch_preset(const QuantizeArgs& args, bool rowwise, bool columnwise,
                   const Execution& execution) {
  if (!args.is_bf16 || args.batch != 1 || !args.x.aligned) return false;
  if (rowwise && !fits_preset(args.row_spec, args.row)) return false;
  if (columnwise && !fits_preset(args.col_spec, args.col)) return false;
  if (rowwise && !columnwise && launch_row(args, execution)) return true;
  if (!columnwise || args.x.rows % kTile != 0 || args.x.cols % kTile != 0) return false;
  if (!rowwise) return launch_column(args, execution);
  return launch_blocks_2d(args, execution) || launch_row_and_column(args, execution);
}

}  // namespace minifloat::cuda
