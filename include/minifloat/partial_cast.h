// Quantizing weights of which each rank holds a flat shard of the high-precision master, many
// weights at once.
//
//     master shard --partial_amax--> amaxes of the blocks that it touches
//                                    | max over ranks, as int32: in the values' order, NaN on top
//                                    | rules that read values: choose_scales, from the shard and
//                                    | the masters that follow it, and the max again
//     master shard --partial_cast--> the shard's codes, and every scale of the weight
//                                    | gather of the codes' bytes
//     codes        --transpose_many--> the other direction, where both have the same codes
//
// The bytes are those of `quantize` on the whole weight. A cast writes flat codes: in W's own
// order, columnwise ones too, so that a flat shard is one range of bytes. Gathered columnwise codes
// are then transposed.
#pragma once

#include <cstdint>
#include <span>

#include "minifloat/core/shard.h"
#include "minifloat/spec.h"
#include "minifloat/tensor_ref.h"

namespace minifloat {

// The cells of W (N, K), the elements that share an amax, in W's own orientation for both
// directions.
struct AmaxGrid {
  std::int64_t height = 1, width = 1;  // of a cell
  std::int64_t rows = 0, cols = 0;     // of the grid
  bool has_tensor_amax = false;        // one more, behind the grid's: NVFP4

  std::int64_t cells() const { return rows * cols; }
  std::int64_t count() const { return cells() + (has_tensor_amax ? 1 : 0); }
};
AmaxGrid amax_grid(const Spec& spec, bool columnwise, std::int64_t rows, std::int64_t cols);

// One direction of one weight W (rows, cols), and the shard of its master that this rank holds.
struct PartialCast {
  Spec spec;  // to nearest, without a transform
  bool columnwise = false;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  DType compute = DType::kBFloat16;  // the dtype that masters are rounded to first

  Span shard;                    // of W's flat elements; empty: this rank holds nothing of it
  const void* master = nullptr;  // (shard.size())
  DType dtype = DType::kFloat32;
  // Masters that follow the shard, where its end splits blocks (core/shard.h) and the rule reads
  // values: to the end of the range around the cut. Only choose_scales reads them.
  const float* following = nullptr;

  // (amax_grid().count()): the grid's, then the tensor's; bit patterns.
  std::uint32_t* amaxes = nullptr;
  // The flat codes from byte `first_byte` on. Where a nibble of the first or last byte is another
  // shard's, that nibble stays as it is, or becomes zero.
  std::uint8_t* codes = nullptr;
  std::int64_t first_byte = 0;
  bool keeps_other_nibbles = true;
  void* scale = nullptr;  // whole, as read
  // Whether `amaxes` have been through choose_scales.
  bool has_chosen_scales = false;
  // As in minifloat/quantize.h; null: not written. Under +delayed: on entry the active amax, on
  // return the current amax, for the history.
  float* amax = nullptr;
};

// Throws what the functions below would throw of all but `amaxes` and `following`, before any runs.
void check_partial_casts(std::span<const PartialCast> casts);

// Raises `amaxes`, zero before and separate for each cast, to those of the shard's values. Here and
// in partial_cast, two consecutive casts of one weight's two directions, with the same master and
// shard, take one read of the master.
void partial_amax(std::span<const PartialCast> casts, Device device,
                  const Execution& execution = {});

// Writes the choice of each block's scale into the sign bit of the block's amax, from `amaxes` of
// the whole weights. Only for specs whose rule reads values (core/scale_rule.h); other casts are
// skipped. A shard chooses for the blocks whose first element it holds, and needs `following` where
// its end splits some. The bit is set where the first scale is taken, and in the blocks of other
// shards, so that a max over ranks as int32 keeps every choice.
void choose_scales(std::span<const PartialCast> casts, Device device,
                   const Execution& execution = {});

// Writes the scales and amaxes of whole weights, and the codes of the shards, from `amaxes` of the
// whole weights. Where a rule reads values and has_chosen_scales is not set, the shard must be the
// whole weight, and its `amaxes` are overwritten.
void partial_cast(std::span<const PartialCast> casts, Device device,
                  const Execution& execution = {});

// A matrix (rows, cols) of elements of 4 (packed two a byte, row by row), 8 or 32 bits, and the
// memory of its transpose.
struct Transpose {
  const void* from = nullptr;
  void* to = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  int bits = 8;
};
void transpose_many(std::span<const Transpose> matrices, Device device,
                    const Execution& execution = {});

// A copy of bytes, or an OR into the bytes that are there: the nibbles of a byte that two shards
// share. ORs are done after all copies.
struct Copy {
  const std::uint8_t* from = nullptr;
  std::uint8_t* to = nullptr;
  std::int64_t bytes = 0;
  bool is_or = false;
};
void copy_many(std::span<const Copy> copies, Device device, const Execution& execution = {});

}  // namespace minifloat
