// The kernels of what layers quantize all day: bf16, sizes that are whole units or tiles, scales as presets round them.
// The rule and its rounding are known when they are compiled, and no edge is looked for. Everything else is
// quantize.cuh's.
#include "nibbles.cuh"
#include "quantize.cuh"

namespace minifloat::cuda {
namespace {

template <ScaleRule Rule, class Format, bool Stochastically, bool Transformed,
          ScaleRounding Rounding = ScaleRounding::kDefault>
struct PlainCast : Cast<Format, Stochastically, Transformed> {
  static constexpr ScaleRule kRule = Rule;
  static constexpr ScaleRounding kRounding = Rounding;
  static constexpr bool kBlocks = Rule != ScaleRule::kTensor && Rule != ScaleRule::kRow;
  static constexpr int units_log2() {  // of a block's row
    return Rule == ScaleRule::kNvfp4 ? 0 : Rule == ScaleRule::kMx ? 1 : 3;
  }
};

template <class C>
bool is_of(const Spec& spec) {
  return is_cast<C>(spec) && spec.rule == C::kRule && spec.scale_rounding == C::kRounding;
}

// ---- What holds for the whole operand ------------------------------------------------------------
// One thread finds it, in shared memory, while the block waits for its values; what takes a division or two, every
// thread.
struct Whole {
  MatrixScale scale;
  std::uint32_t keys[2 * kPhiloxRounds];
  std::uint32_t stream[2], row, group;  // of random bits
};
template <class C>
constexpr bool kIsShared = C::kStochastic || C::kRule == ScaleRule::kNvfp4;

template <class C>
__device__ __forceinline__ void prepare(const OperandPlan& plan, Whole& whole) {
  if constexpr (kIsShared<C>)
    whole.scale = matrix_scale<typename C::F>(plan, C::kRule, C::kRounding, 0);
  if constexpr (C::kStochastic) {
    const RandomKey random = random_key(plan);
    std::uint32_t k0 = static_cast<std::uint32_t>(random.key),
                  k1 = static_cast<std::uint32_t>(random.key >> 32);
    for (int i = 0; i < kPhiloxRounds; ++i) {
      whole.keys[2 * i] = k0, whole.keys[2 * i + 1] = k1;
      k0 += kPhiloxKeyStep0, k1 += kPhiloxKeyStep1;
    }
    whole.stream[0] = static_cast<std::uint32_t>(random.stream);
    whole.stream[1] = static_cast<std::uint32_t>(random.stream >> 32);
    whole.row = static_cast<std::uint32_t>(plan.origin_row);
    whole.group = static_cast<std::uint32_t>(plan.origin_col / kUnit);
  }
  if (blockIdx.x == 0 && C::kRule != ScaleRule::kRow && plan.amax)
    store_whole<typename C::F>(plan, 0, plan.amax[0]);
}
template <class C>
__device__ __forceinline__ MatrixScale scale_of_whole(const OperandPlan& plan, const Whole& whole) {
  if constexpr (kIsShared<C>) return whole.scale;
  return matrix_scale<typename C::F>(plan, C::kRule, C::kRounding, 0);
}
// core/philox.h's random_words, from the keys of all rounds.
__device__ __forceinline__ Words words_at(const Whole& whole, std::uint32_t row,
                                          std::uint32_t group) {
  Words c = {{whole.group + group, whole.row + row, whole.stream[0], whole.stream[1]}};
#pragma unroll
  for (int i = 0; i < kPhiloxRounds; ++i)
    c = philox_round(c, whole.keys[2 * i], whole.keys[2 * i + 1]);
  return c;
}

// ---- A unit --------------------------------------------------------------------------------------
// What is to be cast, its amax, and what its elements are still to be multiplied by.
struct Turned {
  Unit<Bf16> unit;
  std::uint32_t amax;
  float owed;
};
template <class C, class Elements>
__device__ __forceinline__ Turned turn_plain(const Elements& given) {
  if constexpr (C::kTransform) {
    // The transform's 1/4 commutes with rounding to bf16, but at the ends of the range: elsewhere the factor of the cast
    // takes it along.
    constexpr std::uint32_t kLow = bit_cast<std::uint32_t>(0x1p-90f),
                            kHigh = bit_cast<std::uint32_t>(0x1p120f);
    static_assert(hadamard_norm(kUnit) == 0.25f);
    float v[kUnit];
    hadamard_sums(given, kUnit, kHadamardSigns, v);
    Turned t = {round_unit(v, 1.0f), 0, 0.25f};
    t.amax = t.unit.amax();
    if (t.amax - kLow < kHigh - kLow) {
      t.amax -= 2u << Float32::kMantissaBits;
    } else {
      t.unit = round_unit(v, 0.25f);
      t.amax = t.unit.amax();
      t.owed = 1.0f;
    }
    return t;
  } else {
    Turned t = {given, 0, 1.0f};
    if constexpr (C::kBlocks) t.amax = t.unit.amax();
    return t;
  }
}

// at: where it lies in the codes, in units. amax: of its block.
template <class C>
__device__ __forceinline__ void encode_and_store(const OperandPlan& plan, const Turned& turned,
                                                 const BlockScale& block, std::uint32_t amax,
                                                 const Words& words, std::uint64_t at) {
  const Codes<typename C::F> codes =
      encode_in_block<C>(plan, C::kRule, turned.unit, block, amax, words, turned.owed);
  store_unit<typename C::F>(plan.codes, at, codes);
  if (plan.decoded)
    store_product_values<typename C::F>(codes, block.scale, plan.decoded + at * kUnit, 0, kUnit,
                                        true);
}

// ---- By rows -------------------------------------------------------------------------------------
// A matrix without gaps is one run of units.
struct RunOfUnits {
  const uint4* x;
  std::uint32_t count;
  Divisor units_of_row;
};

template <class C>
__global__ void __launch_bounds__(kThreads, 4)
    quantize_run(const __grid_constant__ RunOfUnits run, const __grid_constant__ OperandPlan plan) {
  __shared__ Whole whole;
  const std::uint32_t first = blockIdx.x * (kThreads * kUnitsOfRows) + threadIdx.x;
  Unit<Bf16> units[kUnitsOfRows];
#pragma unroll
  for (int i = 0; i < kUnitsOfRows; ++i) {
    const std::uint32_t u = first + i * kThreads;
    units[i] = {};
    if (u >= run.count) continue;
    *reinterpret_cast<uint4*>(&units[i]) = __ldg(run.x + std::uint64_t{u} * 2);
    *(reinterpret_cast<uint4*>(&units[i]) + 1) = __ldg(run.x + std::uint64_t{u} * 2 + 1);
  }
  if (threadIdx.x == 0) prepare<C>(plan, whole);
  __syncthreads();
  const MatrixScale scale = scale_of_whole<C>(plan, whole);
#pragma unroll
  for (int i = 0; i < kUnitsOfRows; ++i) {
    const std::uint32_t u = first + i * kThreads;
    const Turned turned = turn_plain<C>(units[i]);
    const std::uint32_t amax = C::kBlocks ? amax_of_lanes(turned.amax, C::units_log2()) : 0;
    if (u >= run.count) continue;  // and take part in the next unit's exchange
    const BlockScale block = block_scale<typename C::F>(C::kRule, C::kRounding, scale, amax);
    if constexpr (C::kBlocks)
      if (u % (1 << C::units_log2()) == 0)
        store_scale_at(plan, C::kRule, block, u >> C::units_log2());
    Words words = {};
    if constexpr (C::kStochastic) {
      const std::uint32_t row = run.units_of_row.divide(u);
      words = words_at(whole, row, u - row * run.units_of_row.d);
    }
    encode_and_store<C>(plan, turned, block, amax, words, u);
  }
}

template <class C>
void launch_run(const QuantizeArgs& args, const Execution& execution) {
  const std::int64_t of_row = args.x.cols / kUnit, count = args.x.rows * of_row;
  const RunOfUnits run = {static_cast<const uint4*>(args.x.data), static_cast<std::uint32_t>(count),
                          Divisor(of_row)};
  const unsigned grid = grid_of(ceil_div<std::int64_t>(count, kThreads * kUnitsOfRows), "quantize");
  quantize_run<C><<<grid, kThreads, 0, stream_of(execution)>>>(run, args.row);
  check_launch("quantize");
}

// ---- By tiles ------------------------------------------------------------------------------------
template <class C, bool kTransposed>
__device__ __forceinline__ void cast_whole_tile(const OperandPlan& plan, const Whole& whole,
                                                const SharedTile<Bf16>& shared,
                                                const TilePlace& tile, std::uint32_t* squares,
                                                bool known) {
  bool is_square = false;
  if constexpr (C::kBlocks && !C::kTransform) {
    is_square = plan.height_log2 > 0;
    if (is_square && !known) amax_of_squares<C, kTransposed>(plan, shared, squares);
  }
  const MatrixScale scale = scale_of_whole<C>(plan, whole);
  const std::uint32_t unit_col = threadIdx.x % kUnitColumns;
  const std::uint32_t col = (kTransposed ? tile.row : tile.col) / kUnit + unit_col;  // in units
  const std::uint32_t first = kTransposed ? tile.col : tile.row;
  const std::uint32_t units_of_row = plan.padded / kUnit;
  shared.template each_unit<kTransposed>([&](const auto& given, unsigned tile_row) {
    const Turned turned = turn_plain<C>(given);
    const std::uint32_t row = first + tile_row;
    std::uint32_t amax = 0;
    if constexpr (C::kBlocks) {
      if (is_square)
        amax = squares[square_of(plan, tile_row, unit_col, known)];
      else
        amax = amax_of_lanes(turned.amax, C::units_log2());
    } else if constexpr (C::kRule == ScaleRule::kRow) {
      const float in_force = plan.amax[row];
      amax = magnitude_bits(in_force);
      if (col == 0) store_whole<typename C::F>(plan, row, in_force);
    }
    const BlockScale block = block_scale<typename C::F>(C::kRule, C::kRounding, scale, amax);
    if constexpr (C::kBlocks)
      if (col % (1 << C::units_log2()) == 0 && (tile_row & ((1u << plan.height_log2) - 1)) == 0)
        store_scale_at(
            plan, C::kRule, block,
            std::uint64_t{row >> plan.height_log2} * plan.scale_cols + (col >> C::units_log2()));
    Words words = {};
    if constexpr (C::kStochastic) words = words_at(whole, row, col);
    encode_and_store<C>(plan, turned, block, amax, words, std::uint64_t{row} * units_of_row + col);
  });
}

// Blocks on a multiprocessor: casts to 8 bits need fewer registers, and wait for memory more.
template <class C>
constexpr bool kIsNarrow = false;
template <class C>
  requires requires { typename C::F; }
constexpr bool kIsNarrow<C> = C::F::kBits == 4;

template <class Row, class Col>
__global__ void __launch_bounds__(kThreads, kIsNarrow<Row> || kIsNarrow<Col> ? 4 : 5)
    quantize_whole_tile(const __grid_constant__ Source x, const __grid_constant__ OperandPlan row,
                        const __grid_constant__ OperandPlan col,
                        const __grid_constant__ Tiles tiles) {
  constexpr bool kRow = !std::is_same_v<Row, Absent>, kCol = !std::is_same_v<Col, Absent>;
  extern __shared__ __align__(16) std::uint32_t words[];
  __shared__ std::uint32_t squares[kSquares];
  __shared__ Whole whole[2];
  const TilePlace tile = tile_place(tiles);
  const SharedTile<Bf16> shared = {words};
  shared.fill<true>(x, tile);
  if constexpr (kRow)
    if (threadIdx.x == 0) prepare<Row>(row, whole[0]);
  if constexpr (kCol)
    if (threadIdx.x == 32) prepare<Col>(col, whole[1]);
  shared.wait();
  if constexpr (kRow) cast_whole_tile<Row, false>(row, whole[0], shared, tile, squares, false);
  if constexpr (kRow && kCol)
    cast_whole_tile<Col, true>(col, whole[1], shared, tile, squares,
                               !Col::kTransform && row.height_log2 == col.height_log2);
  else if constexpr (kCol)
    cast_whole_tile<Col, true>(col, whole[1], shared, tile, squares, false);
}

template <class Row, class Col>
void launch_whole_tiles(const QuantizeArgs& args, const Execution& execution) {
  const Tiles tiles = tiles_of(args.x);
  quantize_whole_tile<Row, Col>
      <<<tile_grid(1, tiles, "quantize"), kThreads, SharedTile<Bf16>::kBytes,
         stream_of(execution)>>>(args.x, args.row, args.col, tiles);
  check_launch("quantize");
}

// ---- Square blocks of FP4 ------------------------------------------------------------------------
// Both directions have the same scales and the same codes, transposed: they are encoded once, and turned in shared memory,
// 8 x 8 codes a thread.
template <class C>
__global__ void __launch_bounds__(kThreads, 4)
    quantize_whole_squares(const __grid_constant__ Source x,
                           const __grid_constant__ OperandPlan row,
                           const __grid_constant__ OperandPlan col,
                           const __grid_constant__ Tiles tiles) {
  constexpr unsigned kCodeWords = kTile / 8;  // of a row of the tile
  extern __shared__ __align__(16) std::uint32_t words[];
  __shared__ std::uint32_t squares[kSquares], codes[kTile * kCodeWords];
  __shared__ Whole whole;
  // Rows 8 apart lie in different banks.
  const auto code_place = [](unsigned r, unsigned word) {
    return r * kCodeWords + (word ^ (r / 8));
  };
  const TilePlace tile = tile_place(tiles);
  const SharedTile<Bf16> shared = {words};
  shared.fill<true>(x, tile);
  if (threadIdx.x == 0) {
    prepare<C>(row, whole);
    if (blockIdx.x == 0 && col.amax) store_whole<E2M1>(col, 0, col.amax[0]);
  }
  shared.wait();
  amax_of_squares<C, false>(row, shared, squares);

  // ---- Rowwise
  const std::uint32_t unit_col = threadIdx.x % kUnitColumns;
  const std::uint32_t first_col = tile.col / kUnit + unit_col;  // in units
  shared.template each_unit<false>([&](const Unit<Bf16>& unit, unsigned tile_row) {
    const std::uint32_t r = tile.row + tile_row;
    const std::uint32_t amax = squares[square_of(row, tile_row, unit_col)];
    const BlockScale block = block_scale<E2M1>(C::kRule, C::kRounding, whole.scale, amax);
    if ((tile_row & ((1u << row.height_log2) - 1)) == 0 &&
        first_col % (1 << C::units_log2()) == 0) {
      const std::uint32_t block_row = r >> row.height_log2,
                          block_col = first_col >> C::units_log2();
      store_scale_at(row, C::kRule, block, std::uint64_t{block_row} * row.scale_cols + block_col);
      store_scale_at(col, C::kRule, block, std::uint64_t{block_col} * col.scale_cols + block_row);
    }
    const Codes<E2M1> both = encode_in_block<C>(row, C::kRule, unit, block, amax, {});
    store_unit<E2M1>(row.codes, std::uint64_t{r} * (row.padded / kUnit) + first_col, both);
    codes[code_place(tile_row, 2 * unit_col)] = both.w[0];
    codes[code_place(tile_row, 2 * unit_col + 1)] = both.w[1];
  });
  __syncthreads();

  // ---- Columnwise
  const unsigned rows_of_8 = threadIdx.x % kCodeWords, word = threadIdx.x / kCodeWords;
  std::uint32_t a[8];
#pragma unroll
  for (unsigned i = 0; i < 8; ++i) a[i] = codes[code_place(rows_of_8 * 8 + i, word)];
  transpose_8x8(a);
  std::uint8_t* to = col.codes + std::uint64_t{tile.col + word * 8} * col.code_pitch +
                     tile.row / 2 + rows_of_8 * 4;
#pragma unroll
  for (int i = 0; i < 8; ++i, to += col.code_pitch) *reinterpret_cast<std::uint32_t*>(to) = a[i];
}

template <class C>
bool try_squares(const QuantizeArgs& args, const Execution& execution) {
  const Spec &row = args.row_spec, &col = args.col_spec;
  if (row != col || row.block_rows <= 1 || !is_of<C>(row) || args.row.decoded || args.col.decoded ||
      args.row.amax != args.col.amax)
    return false;
  const Tiles tiles = tiles_of(args.x);
  quantize_whole_squares<C><<<tile_grid(1, tiles, "quantize"), kThreads, SharedTile<Bf16>::kBytes,
                              stream_of(execution)>>>(args.x, args.row, args.col, tiles);
  check_launch("quantize");
  return true;
}

// ---- The table -----------------------------------------------------------------------------------
bool is_plain(const Spec& spec, const OperandPlan& plan) {
  return plan.aligned &&
         (spec.transform == 0 || (spec.transform == kUnit && plan.height_log2 == 0)) &&
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
using Nearest = PlainCast<Rule, F, false, false>;

constexpr ScaleRule kTensor = ScaleRule::kTensor, kRow = ScaleRule::kRow,
                    kBlock = ScaleRule::kBlock;

// The casts of a preset whose elements are E2M1.
template <ScaleRule Rule, ScaleRounding Rounding = ScaleRounding::kDefault>
struct Fp4 {
  using Straight = PlainCast<Rule, E2M1, false, false, Rounding>;
  using Turned = PlainCast<Rule, E2M1, false, true, Rounding>;
  using Random = PlainCast<Rule, E2M1, true, false, Rounding>;
  using TurnedRandom = PlainCast<Rule, E2M1, true, true, Rounding>;

  static bool row(const QuantizeArgs& args, const Execution& execution) {
    return try_run<Straight>(args, execution) || try_run<Random>(args, execution);
  }
  static bool column(const QuantizeArgs& args, const Execution& execution) {
    return try_column<Straight>(args, execution) || try_column<Turned>(args, execution) ||
           try_column<TurnedRandom>(args, execution);
  }
  static bool both(const QuantizeArgs& args, const Execution& execution) {
    return try_squares<Straight>(args, execution) || try_both<Straight>(args, execution) ||
           try_both<Straight, Turned>(args, execution) ||
           try_both<Random, TurnedRandom>(args, execution) ||
           try_both<TurnedRandom>(args, execution);
  }
};
using Mxfp4 = Fp4<ScaleRule::kMx>;
using Nvfp4 = Fp4<ScaleRule::kNvfp4>;
using Nvfp4Pow2 = Fp4<ScaleRule::kNvfp4, ScaleRounding::kPowerOfTwo>;
using Mxfp8 = Nearest<ScaleRule::kMx, E4M3>;

bool launch_row(const QuantizeArgs& args, const Execution& execution) {
  const std::int64_t block = std::max(args.row_spec.block_cols, kUnit);
  const bool is_run = args.x.rows == 1 || args.x.row_stride == args.x.cols;
  if (!is_run || args.x.cols % block != 0 || args.row.height_log2 > 0 ||
      args.x.rows * args.x.cols / kUnit >= (std::int64_t{1} << 31) - kThreads * kUnitsOfRows)
    return false;
  return try_run<Nearest<kTensor, E4M3>>(args, execution) ||
         try_run<Nearest<kTensor, E5M2>>(args, execution) ||
         try_run<Nearest<kBlock, E4M3>>(args, execution) || try_run<Mxfp8>(args, execution) ||
         Mxfp4::row(args, execution) || Nvfp4::row(args, execution) ||
         Nvfp4Pow2::row(args, execution);
}
bool launch_column(const QuantizeArgs& args, const Execution& execution) {
  return try_column<Nearest<kTensor, E4M3>>(args, execution) ||
         try_column<Nearest<kTensor, E5M2>>(args, execution) ||
         try_column<Nearest<kRow, E4M3>>(args, execution) ||
         try_column<Nearest<kBlock, E4M3>>(args, execution) || try_column<Mxfp8>(args, execution) ||
         Mxfp4::column(args, execution) || Nvfp4::column(args, execution) ||
         Nvfp4Pow2::column(args, execution);
}
bool launch_row_and_column(const QuantizeArgs& args, const Execution& execution) {
  return try_both<Nearest<kTensor, E4M3>>(args, execution) ||
         try_both<Nearest<kTensor, E5M2>>(args, execution) ||
         try_both<Nearest<kRow, E4M3>>(args, execution) ||
         try_both<Nearest<kBlock, E4M3>>(args, execution) || try_both<Mxfp8>(args, execution) ||
         Mxfp4::both(args, execution) || Nvfp4::both(args, execution) ||
         Nvfp4Pow2::both(args, execution);
}

}  // namespace

bool launch_plain(const QuantizeArgs& args, bool rowwise, bool columnwise,
                  const Execution& execution) {
  if (!args.is_bf16 || args.batch != 1 || !args.x.aligned) return false;
  if (rowwise && !is_plain(args.row_spec, args.row)) return false;
  if (columnwise && !is_plain(args.col_spec, args.col)) return false;
  if (rowwise && !columnwise && launch_row(args, execution)) return true;
  if (!columnwise || args.x.rows % kTile != 0 || args.x.cols % kTile != 0) return false;
  return rowwise ? launch_row_and_column(args, execution) : launch_column(args, execution);
}

}  // namespace minifloat::cuda
