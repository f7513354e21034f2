// Quantization, one or both directions of x from one walk over tiles:
//
//     x (rows, cols)   +-----+-----+      a tile of x is loaded, transformed and encoded as read
//                      | 128 |     |      rowwise, then, still in cache, as read columnwise
//                      | x128|     |
//                      +-----+-----+
//
// The amax of the tensor or of a row, which no tile can decide, is computed first. A group of rows
// is cast as a matrix of its own.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "backends.h"
#include "encode_tile.h"
#include "fp4_cast.h"
#include "grouped.h"
#include "minifloat/core/amax_history.h"
#include "minifloat/error.h"
#include "parallel.h"
#include "with_format.h"

namespace minifloat::cpu {
namespace {

template <class T>
void encode_elements(const EncodeArgs<T>& args) {
  with_format(args.plan->operand.spec.elements,
              [&]<class F>(F) { run_widest<EncodeTile<F, T>>(args); });
}

// The columns of a direction as read: those that the cast writes, and those of a row in memory.
struct Columns {
  std::int64_t written, pitch;
};

// One direction of a quantization: its plan, and the memory behind the plan's pointers.
class DirectionCast {
 public:
  DirectionCast(const TensorRef& x, const Operand& operand, bool columnwise, const Columns& columns,
                const Execution& execution)
      : x_(x), columnwise_(columnwise) {
    const Spec& spec = operand.spec;
    plan_.operand = operand;
    plan_.columnwise = columnwise;
    plan_.batch = x.batch;
    plan_.rows = columnwise ? x.cols : x.rows;
    plan_.cols = columnwise ? x.rows : x.cols;
    plan_.padded = spec.padded_cols(columns.written);
    if (columns.pitch != columns.written) plan_.length = columns.pitch;
    plan_.code_pitch = operand.row_bytes > 0 ? operand.row_bytes : spec.code_cols(columns.pitch);
    plan_.scale_rows = spec.has_blocks() ? spec.scale_rows(plan_.rows) : 0;
    plan_.scale_cols = spec.has_blocks() ? spec.scale_cols(columns.written) : 0;
    if (spec.stochastic)
      plan_.random =
          random_key(operand.random.state, operand.random.state_size, operand.random.stream);
    signs_ = signs_of(spec, operand.random);
    if (operand.swizzled) clear_padding();
    if (spec.has_tensor_amax() || spec.has_row_amax()) compute_active_amax(execution);
  }

  // Encodes the tile of x whose corner is (row, col) of x, `height` rows of x.
  void encode(std::int64_t batch, std::int64_t row, std::int64_t col, std::int64_t height,
              TileMemory& memory) const {
    TileRange range = {batch, row, col, std::clamp<std::int64_t>(x_.rows - row, 0, height),
                       std::min(kTileCols, x_.cols - col)};
    if (columnwise_) range = {batch, col, row, range.cols, range.rows};
    if (range.rows > 0) encode_range(range, memory);
  }

  // Encodes part of one row of x, from a whole tile row on: as a strip, then the rest of the last
  // tile row.
  void encode_strip(std::int64_t batch, std::int64_t row, std::int64_t col, std::int64_t cols,
                    TileMemory& memory) const {
    const std::int64_t whole = cols / kTileCols;
    if (whole > 0) encode_range({batch, row, col, whole, kTileCols, true}, memory);
    if (cols % kTileCols > 0)
      encode_range({batch, row, col + whole * kTileCols, 1, cols % kTileCols, true}, memory);
  }

 private:
  void encode_range(const TileRange& range, TileMemory& memory) const {
    const LoadArgs load = {&x_, columnwise_, plan_.operand.spec.transform, signs_, &range, &memory};
    if (load.points > 0 || x_.dtype == DType::kBFloat16)
      encode_elements<std::uint16_t>({&plan_, &range, load_bf16_tile(load)});
    else
      encode_elements<float>({&plan_, &range, load_fp32_tile(load)});
  }

  // Clears swizzled scales where the layout has room for more than there are.
  void clear_padding() const {
    const std::int64_t size = swizzled_size(plan_.rows, plan_.scale_cols);
    if (size > plan_.rows * plan_.scale_cols)
      std::memset(plan_.operand.scale, 0, static_cast<std::size_t>(plan_.batch * size));
  }

  // Computes the active amaxes, their factors, and the outputs of a tensor or a row: scales and
  // amaxes.
  void compute_active_amax(const Execution& execution) {
    const Operand& operand = plan_.operand;
    const Spec& spec = operand.spec;
    const std::int64_t count = x_.batch * (spec.has_row_amax() ? plan_.rows : 1);
    std::vector<float> current_amax(static_cast<std::size_t>(count));
    const bool needs_current =
        !operand.given_amax || (spec.delayed && (operand.amax || operand.history.first));
    if (needs_current)
      cpu::amax(x_, {spec, columnwise_, operand.random}, current_amax.data(), execution);
    const float* active_amax = operand.given_amax ? operand.given_amax : current_amax.data();
    const float* reported = spec.delayed ? current_amax.data() : active_amax;

    for (std::int64_t i = 0; i < count; ++i) {
      scale_by(magnitude_bits(active_amax[i]));
      if (operand.amax) operand.amax[i] = reported[i];
      if (operand.history.first) {
        float& entry = operand.history.first[i * operand.history.stride];
        entry = larger_amax(entry, current_amax[static_cast<std::size_t>(i)]);
      }
    }
    for (std::int64_t i = 0; !spec.has_blocks() && i < count; ++i)
      static_cast<float*>(operand.scale)[i] =
          spec.has_row_amax() ? rows_[i].scale : tensors_[i].scale;
    plan_.tensor = tensors_.data();
    plan_.row = rows_.data();
  }

  // Appends the factors of one more amax, of a tensor or of a row.
  void scale_by(std::uint32_t amax) {
    const Spec& spec = plan_.operand.spec;
    with_format(spec.elements, [&]<class F>(F) {
      if (spec.has_row_amax() && !spec.has_blocks())
        rows_.push_back(fp32_factors<F>(spec.rule, spec.scale_rounding, amax));
      else
        tensors_.push_back(scale_of_tensor<F>(spec.rule, spec.scale_rounding, amax));
    });
  }

  const TensorRef& x_;
  bool columnwise_;
  OperandPlan plan_;
  HadamardSigns signs_;
  std::vector<TensorScale> tensors_;
  std::vector<ScaleFactors> rows_;
};

// Returns the rows of x in a tile. Rowwise alone a few rows are fastest: the machine then
// prefetches them as streams.
std::int64_t tile_height(const Operand* rowwise, const Operand* columnwise) {
  constexpr std::int64_t kFew = 16;
  return columnwise ? kTileRows : std::max<std::int64_t>(kFew, rowwise->spec.block_rows);
}

// Prefetches the next tile of the walk, whose rows are too short for the machine to prefetch.
void prefetch_tile(const TensorRef& x, std::int64_t batch, std::int64_t row, std::int64_t col,
                   std::int64_t height) {
  constexpr std::int64_t kLine = 64;
  const std::int64_t size = x.dtype == DType::kFloat32 ? 4 : 2;
  const std::int64_t bytes = (std::min(x.cols, col + kTileCols) - col) * size;
  if (bytes <= 0) return;
  for (std::int64_t r = row; r < std::min(x.rows, row + height); ++r) {
    const char* line =
        static_cast<const char*>(x.data) + (batch * x.batch_stride + r * x.row_stride + col) * size;
    for (std::int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(line + at);
  }
}

// Quantizes matrices without groups.   columns: of the columnwise operand
void quantize_matrices(const TensorRef& x, const Operand* rowwise, const Operand* columnwise,
                       const Columns& columns, const Execution& execution) {
  std::vector<DirectionCast> directions;
  directions.reserve(2);
  if (rowwise) directions.emplace_back(x, *rowwise, false, Columns{x.cols, x.cols}, execution);
  if (columnwise) directions.emplace_back(x, *columnwise, true, columns, execution);

  const std::int64_t elements = x.batch * x.rows * x.cols;
  if (!columnwise && rowwise->spec.block_rows <= 1) {
    constexpr std::int64_t kStrip = 16 * kTileCols;
    const std::int64_t strips = ceil_div(x.cols, kStrip);
    parallel_for(execution, x.batch * x.rows * strips, elements, [&](std::int64_t i) {
      TileMemory memory;
      const std::int64_t row = i / strips, col = i % strips * kStrip;
      directions[0].encode_strip(row / x.rows, row % x.rows, col, std::min(kStrip, x.cols - col),
                                 memory);
    });
    return;
  }
  const std::int64_t height = tile_height(rowwise, columnwise);
  const std::int64_t rows = columnwise ? columns.written : x.rows;  // with those of zeros
  const std::int64_t down = ceil_div(rows, height), across = ceil_div(x.cols, kTileCols);
  parallel_for(execution, x.batch * down * across, elements, [&](std::int64_t i) {
    TileMemory memory;
    const std::int64_t batch = i / across / down, row = i / across % down * height,
                       col = i % across * kTileCols;
    if (!rowwise) prefetch_tile(x, batch, row, col + kTileCols, height);
    for (const DirectionCast& direction : directions)
      direction.encode(batch, row, col, height, memory);
  });
}

struct Backend {
  static constexpr auto quantize = cpu::quantize;
  static constexpr auto fp4_as_fp8 = cpu::fp4_as_fp8;
};

}  // namespace

void quantize(const TensorRef& x, const Operand* rowwise, const Operand* columnwise,
              const Execution& execution) {
  if (is_as_fp8(rowwise) || is_as_fp8(columnwise)) {
    std::unique_ptr<std::byte[]> memory;
    return quantize_in_two_steps<Backend>(
        x, rowwise, columnwise, execution, [&](std::size_t bytes) {
          memory = std::make_unique_for_overwrite<std::byte[]>(bytes);
          return memory.get();
        });
  }
  if (x.rows_from) return cpu::quantize(GatheredRows(x).x(), rowwise, columnwise, execution);
  if (rowwise && rowwise->amaxes_of_columns)
    cpu::amax(x, {.spec = rowwise->spec, .columnwise = true}, rowwise->amaxes_of_columns,
              execution);
  if (!x.groups) return quantize_matrices(x, rowwise, columnwise, {x.rows, x.rows}, execution);
  const std::int64_t unit = x.groups.unit,
                     pitch =
                         columnwise ? grouped_cols<std::int64_t>(x.rows, unit, x.groups.count) : 0;
  each_group(x.groups, [&](const Group& group) {
    Operand row, col;
    if (rowwise) row = operand_of(x, *rowwise, group, false);
    if (columnwise) col = operand_of(x, *columnwise, group, true);
    quantize_matrices(rows_of(x, group), rowwise ? &row : nullptr, columnwise ? &col : nullptr,
                      {group.cols, pitch}, execution);
  });
}

}  // namespace minifloat::cpu
