// The preset casts, and which kernels are compiled for each. A preset's cast is one row of Table; a
// kernel is found for its rows by find_preset. The tile kernels of kWalksOfColumns also cast
// columnwise alone, unless the rowwise cast has 2D blocks.
#pragma once

#include <type_traits>

#include "cuda/quantize/preset.cuh"

namespace minifloat::cuda {

// The kernels, by how they read x or compute it.
enum Walk : unsigned {
  kRowsWalk = 1 << 0,          // matrices by rows: preset_rows.cu
  kTilesWalk = 1 << 1,         // matrices by tiles: preset_tiles.cu
  kFp32TilesWalk = 1 << 2,     // of fp32: preset_fp32_tiles.cu
  kBlocks2dWalk = 1 << 3,      // the same codes in both directions: preset_blocks_2d.cu
  kGroupRowsWalk = 1 << 4,     // groups, and matrices of a batch: preset_group_rows.cu
  kGroupTilesWalk = 1 << 5,    // groups: preset_group_tiles.cu
  kSwiGluRowsWalk = 1 << 6,    // SwiGLU's values by rows: activation/quantize_swiglu_rows.cu
  kSwiGluTilesWalk = 1 << 7,   // the same by tiles: activation/quantize_swiglu_tiles.cu
  kSwiGluMatrixWalk = 1 << 8,  // the same without groups
  kStridedRowsWalk = 1 << 9    // rows that may lie apart, of bf16 or fp32: preset_strided_rows.cu
};
inline constexpr unsigned kWalksOfColumns =  // whose kernels may leave out the rowwise cast
    kTilesWalk | kGroupTilesWalk | kSwiGluTilesWalk;

namespace preset {

template <ScaleRule Rule, class F>
using Nearest = PresetCast<Rule, F, false, false>;

using Tensor = Nearest<ScaleRule::kTensor, E4M3>;
using TensorE5m2 = Nearest<ScaleRule::kTensor, E5M2>;
using Row = Nearest<ScaleRule::kRow, E4M3>;
using Block = Nearest<ScaleRule::kBlock, E4M3>;
using Block2d = PresetCast<ScaleRule::kBlock, E4M3, false, false, true>;
using BlockExact = PresetCast<ScaleRule::kBlock, E4M3, false, false, false, ScaleRounding::kExact>;
using Block2dExact = PresetCast<ScaleRule::kBlock, E4M3, false, false, true, ScaleRounding::kExact>;
using Mxfp8 = Nearest<ScaleRule::kMx, E4M3>;
using BlockRandom = PresetCast<ScaleRule::kBlock, E4M3, true, false>;
using Mxfp8Random = PresetCast<ScaleRule::kMx, E4M3, true, false>;
using Mxfp8Block2d = PresetCast<ScaleRule::kMx, E4M3, false, false, true>;

// The casts to a 4-bit format under one rule.
template <ScaleRule Rule, ScaleRounding Rounding = ScaleRounding::kDefault, class F = E2M1>
struct Fp4 {
  using Straight = PresetCast<Rule, F, false, false, false, Rounding>;
  using Block2d = PresetCast<Rule, F, false, false, true, Rounding>;
  using Transformed = PresetCast<Rule, F, false, true, false, Rounding>;
  using Random = PresetCast<Rule, F, true, false, false, Rounding>;
  using TransformedRandom = PresetCast<Rule, F, true, true, false, Rounding>;
};
using Mxfp4 = Fp4<ScaleRule::kMx>;
using Nvfp4 = Fp4<ScaleRule::kNvfp4>;
using Nvfp4Pow2 = Fp4<ScaleRule::kNvfp4, ScaleRounding::kPowerOfTwo>;
using Nvfp4FourOverSix = Fp4<ScaleRule::kNvfp4, ScaleRounding::kFourOverSix>;
using E1m2Pow2 = Fp4<ScaleRule::kNvfp4, ScaleRounding::kPowerOfTwo, E1M2>;
using StraightAsFp8 = AsFp8<Nvfp4Pow2::Straight>;
using RandomAsFp8 = AsFp8<Nvfp4Pow2::Random>;
using TransformedAsFp8 = AsFp8<Nvfp4Pow2::Transformed>;
using TransformedRandomAsFp8 = AsFp8<Nvfp4Pow2::TransformedRandom>;

// What is written rowwise and columnwise, and by which kernels.
template <class RowCast, class ColCast, unsigned Walks>
struct Pair {
  using Row = RowCast;
  using Col = ColCast;
  static constexpr unsigned kWalks = Walks;
};
// Of SwiGLU's backward pass: both directions of the gradients, and h columnwise.
template <class RowCast, class ColCast, class HCast>
struct Gradients {
  using Row = RowCast;
  using Col = ColCast;
  using H = HCast;
};
template <class... Entries>
struct List {};

inline constexpr unsigned kEveryRow = kRowsWalk | kGroupRowsWalk | kSwiGluRowsWalk,
                          kEveryTile = kTilesWalk | kGroupTilesWalk | kSwiGluTilesWalk,
                          kOfMemoryRows = kRowsWalk | kGroupRowsWalk,
                          kOfMemoryTiles = kTilesWalk | kGroupTilesWalk;

// clang-format off
using Table = List<
    // ---- Rowwise
    Pair<Tensor, Absent, kEveryRow>,
    Pair<TensorE5m2, Absent, kOfMemoryRows>,
    Pair<Block, Absent, kEveryRow | kStridedRowsWalk>,
    Pair<BlockExact, Absent, kOfMemoryRows>,
    Pair<Mxfp8, Absent, kEveryRow | kStridedRowsWalk>,
    Pair<BlockRandom, Absent, kRowsWalk | kStridedRowsWalk>,  // of messages
    Pair<Mxfp8Random, Absent, kRowsWalk | kStridedRowsWalk>,
    Pair<Mxfp4::Straight, Absent, kEveryRow | kStridedRowsWalk>,
    Pair<Mxfp4::Random, Absent, kOfMemoryRows | kSwiGluRowsWalk | kStridedRowsWalk>,
    Pair<Nvfp4::Straight, Absent, kOfMemoryRows>,
    Pair<Nvfp4::Random, Absent, kOfMemoryRows>,
    Pair<Nvfp4Pow2::Straight, Absent, kOfMemoryRows>,
    Pair<Nvfp4Pow2::Random, Absent, kOfMemoryRows>,
    Pair<Nvfp4FourOverSix::Straight, Absent, kRowsWalk>,
    Pair<E1m2Pow2::Transformed, Absent, kRowsWalk>,
    Pair<E1m2Pow2::TransformedRandom, Absent, kRowsWalk>,
    Pair<StraightAsFp8, Absent, kRowsWalk>,
    Pair<RandomAsFp8, Absent, kRowsWalk>,

    // ---- Columnwise, where no pair below has the same walk, or a pair's kernel is slower
    Pair<Absent, Block2d, kTilesWalk>,
    Pair<Absent, Mxfp8Block2d, kTilesWalk>,
    Pair<Absent, Nvfp4::Block2d, kTilesWalk>,
    Pair<Absent, Nvfp4Pow2::Block2d, kTilesWalk>,
    Pair<Absent, Mxfp4::Transformed, kOfMemoryTiles>,
    Pair<Absent, Nvfp4::Transformed, kOfMemoryTiles>,
    Pair<Absent, Nvfp4Pow2::Transformed, kOfMemoryTiles>,
    Pair<Absent, Mxfp4::Straight, kSwiGluTilesWalk>,
    Pair<Absent, Mxfp4::TransformedRandom, kSwiGluTilesWalk>,

    // ---- Both
    Pair<Tensor, Tensor, kEveryTile | kFp32TilesWalk>,
    Pair<TensorE5m2, TensorE5m2, kOfMemoryTiles>,
    Pair<Row, Row, kEveryTile | kFp32TilesWalk>,
    Pair<Block, Block, kEveryTile | kFp32TilesWalk>,
    Pair<Block2d, Block2d, kTilesWalk | kFp32TilesWalk>,
    Pair<BlockExact, BlockExact, kOfMemoryTiles>,
    Pair<Block2dExact, Block2dExact, kTilesWalk>,
    Pair<Mxfp8, Mxfp8, kEveryTile | kFp32TilesWalk>,
    Pair<Mxfp8Block2d, Mxfp8Block2d, kTilesWalk | kFp32TilesWalk>,
    Pair<Mxfp4::Straight, Mxfp4::Straight, kOfMemoryTiles | kFp32TilesWalk>,
    Pair<Mxfp4::Straight, Mxfp4::Transformed, kEveryTile>,
    Pair<Mxfp4::Random, Mxfp4::TransformedRandom, kOfMemoryTiles>,
    Pair<Mxfp4::TransformedRandom, Mxfp4::TransformedRandom, kOfMemoryTiles>,
    Pair<Nvfp4::Straight, Nvfp4::Straight, kOfMemoryTiles | kFp32TilesWalk>,
    Pair<Nvfp4::Straight, Nvfp4::Transformed, kOfMemoryTiles | kSwiGluMatrixWalk>,
    Pair<Nvfp4::Random, Nvfp4::TransformedRandom, kOfMemoryTiles>,
    Pair<Nvfp4::TransformedRandom, Nvfp4::TransformedRandom, kOfMemoryTiles>,
    Pair<Nvfp4::Block2d, Nvfp4::Block2d, kTilesWalk | kFp32TilesWalk | kBlocks2dWalk>,
    Pair<Nvfp4Pow2::Straight, Nvfp4Pow2::Straight, kOfMemoryTiles>,
    Pair<Nvfp4Pow2::Straight, Nvfp4Pow2::Transformed, kOfMemoryTiles | kSwiGluMatrixWalk>,
    Pair<Nvfp4Pow2::Random, Nvfp4Pow2::TransformedRandom, kOfMemoryTiles>,
    Pair<Nvfp4Pow2::TransformedRandom, Nvfp4Pow2::TransformedRandom, kOfMemoryTiles>,
    Pair<Nvfp4Pow2::Block2d, Nvfp4Pow2::Block2d, kTilesWalk | kFp32TilesWalk | kBlocks2dWalk>,
    Pair<E1m2Pow2::Transformed, E1m2Pow2::Transformed, kTilesWalk>,
    Pair<E1m2Pow2::TransformedRandom, E1m2Pow2::TransformedRandom, kTilesWalk>,
    Pair<Nvfp4FourOverSix::Block2d, Nvfp4FourOverSix::Block2d, kBlocks2dWalk>,
    Pair<Mxfp8, Nvfp4::Transformed, kOfMemoryTiles>,
    Pair<Mxfp8, Nvfp4::Block2d, kTilesWalk>,
    Pair<Nvfp4::Straight, Mxfp8, kOfMemoryTiles>,
    Pair<Nvfp4::Block2d, Mxfp8, kTilesWalk>,
    Pair<StraightAsFp8, Nvfp4Pow2::Straight, kTilesWalk>,
    Pair<StraightAsFp8, Nvfp4Pow2::Transformed, kTilesWalk>,
    Pair<RandomAsFp8, TransformedRandomAsFp8, kTilesWalk>>;

using GradientTable = List<
    Gradients<TensorE5m2, TensorE5m2, Tensor>,
    Gradients<Row, Row, Row>,
    Gradients<Block, Block, Block>,
    Gradients<Mxfp8, Mxfp8, Mxfp8>,
    Gradients<Mxfp4::TransformedRandom, Mxfp4::TransformedRandom, Mxfp4::Transformed>,
    Gradients<Nvfp4::Random, Nvfp4::TransformedRandom, Nvfp4::Transformed>,
    Gradients<Nvfp4Pow2::Random, Nvfp4Pow2::TransformedRandom, Nvfp4Pow2::Transformed>,
    Gradients<RandomAsFp8, TransformedRandomAsFp8, TransformedAsFp8>>;
// clang-format on

// ---- The choice ---------------------------------------------------------------------------------
template <class C>
constexpr bool kIsFp4 = C::F::kBits == 4;
template <>
constexpr bool kIsFp4<Absent> = false;

// Whether a pair's kernel may leave out its rowwise cast: not of 2D blocks, whose amaxes the
// columnwise cast reads.
template <class C>
constexpr bool kMayBeLeftOut = !C::kIsBlock2d;
template <>
constexpr bool kMayBeLeftOut<Absent> = false;

// Returns whether a direction is cast by C.   spec: null: it is not cast
template <class C>
bool is_cast_by(const Spec* spec, bool is_as_fp8) {
  if constexpr (std::is_same_v<C, Absent>)
    return !spec;
  else
    return spec && is_of<C>(*spec) && C::kAsFp8 == is_as_fp8;
}

// A unit may compile a part of a table: casts to FP8 alone, or all others.
enum class Formats { kAll, kFp8, kWithFp4 };
template <class Entry, Formats kFormats>
constexpr bool kIsCompiled =
    kFormats == Formats::kAll ||
    (kIsFp4<typename Entry::Row> || kIsFp4<typename Entry::Col>) == (kFormats == Formats::kWithFp4);

// Calls f.operator()<Entry>() for each entry of a table until it returns true.
template <class F, class... Entries>
bool any_of(List<Entries...>, const F& f) {
  return (f.template operator()<Entries>() || ...);
}

}  // namespace preset

// Returns kernel_of.operator()<Row, Col>(), a launch, for the row of the table that casts the
// directions of args, or for a pair of which only the columnwise cast is wanted; null where the
// kernels of kWalks have none.
template <unsigned kWalks, class KernelOf>
auto find_preset(const QuantizeArgs& args, const KernelOf& kernel_of) {
  using namespace preset;
  decltype(kernel_of.template operator()<preset::Tensor, preset::Tensor>()) found = nullptr;
  any_of(Table{}, [&]<class Entry>() {
    if constexpr ((Entry::kWalks & kWalks) != 0) {
      using Row = typename Entry::Row;
      using Col = typename Entry::Col;
      constexpr bool kColumns = (kWalks & kWalksOfColumns) != 0 && kMayBeLeftOut<Row>;
      const bool is_left_out = kColumns && !args.rowwise;
      if ((!is_left_out && !is_cast_by<Row>(args.rowwise ? &args.row_spec : nullptr,
                                            args.row.row_scale != nullptr)) ||
          !is_cast_by<Col>(args.columnwise ? &args.col_spec : nullptr,
                           args.col.row_scale != nullptr))
        return false;
      found = kernel_of.template operator()<Row, Col>();
      return true;
    } else {
      return false;
    }
  });
  return found;
}

}  // namespace minifloat::cuda
