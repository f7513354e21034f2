// Partial casts, a band of rows of a shard at a time:
//
//     amax      a band's maxima raise the cells of its rows; a cell of several bands by atomics
//     cast      each cell's scale, from the reduced amaxes; then each element, by its cell's factor
//
// A shard is any flat range (core/shard.h). The part of a row that it holds is processed cell by
// cell, the cells of its AmaxGrid. Choices by values are made a row of cells at a time.
#include "minifloat/partial_cast.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "backends.h"
#include "block_scale.h"
#include "encode_fast.h"
#include "parallel.h"
#include "with_format.h"

namespace minifloat::cpu {
namespace {

constexpr std::int64_t kBandRows = 128;  // a whole number of every block

struct Band {
  const PartialCast* cast;
  AmaxGrid grid;
  Span rows;
};

// Returns the bands of all shards. A band begins and ends between blocks, or where its shard does.
std::vector<Band> bands_of(std::span<const PartialCast> casts) {
  std::vector<Band> bands;
  for (const PartialCast& cast : casts) {
    const Span rows = FlatShard{cast.cols, cast.shard}.rows();
    const AmaxGrid grid = amax_grid(cast.spec, cast.columnwise, cast.rows, cast.cols);
    for (std::int64_t r = rows.begin; r < rows.end;) {
      const std::int64_t end = std::min(round_up(r + 1, kBandRows), rows.end);
      bands.push_back({&cast, grid, {r, end}});
      r = end;
    }
  }
  return bands;
}

std::int64_t elements_of(std::span<const PartialCast> casts) {
  std::int64_t elements = 0;
  for (const PartialCast& cast : casts) elements += cast.shard.size();
  return elements;
}

// Calls f(cell, columns) for each part of a row that lies in one cell.
template <class F>
MINIFLOAT_INLINE void each_cell(const AmaxGrid& grid, std::int64_t row, const Span& cols, F f) {
  const std::int64_t first = row / grid.height * grid.cols;
  for (std::int64_t c = cols.begin; c < cols.end;) {
    const std::int64_t cell = c / grid.width;
    const std::int64_t end = std::min((cell + 1) * grid.width, cols.end);
    f(first + cell, Span{c, end});
    c = end;
  }
}

// Returns a master's value in the compute dtype.
MINIFLOAT_INLINE float computed(float x, bool round) { return round ? round_to_bf16(x) : x; }
MINIFLOAT_INLINE float computed(std::uint16_t x, bool) { return to_float(x); }

void raise(std::uint32_t& cell, std::uint32_t amax) {
  std::atomic_ref<std::uint32_t> shared(cell);
  std::uint32_t seen = shared.load(std::memory_order_relaxed);
  while (seen < amax && !shared.compare_exchange_weak(seen, amax, std::memory_order_relaxed)) {
  }
}

// ---- amax ---------------------------------------------------------------------------------------
template <class T>
struct BandAmax {
  MINIFLOAT_INLINE static void run(const Band& band) {
    const PartialCast& cast = *band.cast;
    const FlatShard shard = {cast.cols, cast.shard};
    const bool round = cast.compute == DType::kBFloat16, narrow = band.grid.width == 1;
    const bool spans_bands = band.grid.height > kBandRows;
    std::uint32_t of_band = 0;
    for (std::int64_t r = band.rows.begin; r < band.rows.end; ++r) {
      const Span cols = shard.cols_of_row(r);
      const T* row = static_cast<const T*>(cast.master) + (r * cast.cols - cast.shard.begin);
      if (narrow && !spans_bands) {
        std::uint32_t* cells = cast.amaxes + r / band.grid.height * band.grid.cols;
        for (std::int64_t c = cols.begin; c < cols.end; ++c) {
          const std::uint32_t x = magnitude_bits(computed(row[c], round));
          cells[c] = x > cells[c] ? x : cells[c];
        }
        continue;
      }
      each_cell(band.grid, r, cols, [&](std::int64_t cell, const Span& part) {
        std::uint32_t m = 0;
        for (std::int64_t c = part.begin; c < part.end; ++c) {
          const std::uint32_t x = magnitude_bits(computed(row[c], round));
          m = x > m ? x : m;
        }
        of_band = m > of_band ? m : of_band;
        if (spans_bands)
          raise(cast.amaxes[cell], m);
        else
          cast.amaxes[cell] = std::max(cast.amaxes[cell], m);
      });
    }
    if (!band.grid.has_tensor_amax) return;
    if (narrow) {  // cells that the loop above has not visited
      const std::int64_t first = band.rows.begin / band.grid.height,
                         end = (band.rows.end - 1) / band.grid.height + 1;
      for (std::int64_t i = first * band.grid.cols; i < end * band.grid.cols; ++i)
        of_band = std::max(of_band, cast.amaxes[i]);
    }
    raise(cast.amaxes[band.grid.cells()], of_band);
  }
};

// ---- Scales -------------------------------------------------------------------------------------
// Returns the amax that scales and codes are made with: under +delayed, that of earlier steps.
// choose_scales leaves the sign bit clear of a block whose second scale is taken.
std::uint32_t active_amax(const PartialCast& cast, std::int64_t cell) {
  if (cast.spec.delayed) return magnitude_bits(cast.amax[0]);
  return cast.spec.reads_values() ? cast.amaxes[cell] ^ kSecondScale : cast.amaxes[cell];
}

// Returns the scale of the whole weight.
template <class F>
TensorScale tensor_scale(const PartialCast& cast, const AmaxGrid& grid) {
  const Spec& spec = cast.spec;
  if (!spec.has_tensor_amax()) return {};
  const std::uint32_t amax =
      grid.has_tensor_amax ? cast.amaxes[grid.cells()] : active_amax(cast, 0);
  return scale_of_tensor<F>(spec.rule, spec.scale_rounding, amax);
}

template <class F>
MINIFLOAT_INLINE BlockScale cell_scale(const Spec& spec, const TensorScale& tensor,
                                       std::uint32_t amax) {
  return scale_of_block<F>(spec.rule, spec.scale_rounding, tensor, amax);
}

// Returns the fp32 scale of a cell: of the tensor, of a row or of a block.
template <class F>
float fp32_scale(const Spec& spec, const TensorScale& tensor, std::uint32_t amax) {
  if (spec.rule == ScaleRule::kTensor) return tensor.scale;
  return fp32_factors<F>(spec.rule, spec.scale_rounding, amax).scale;
}

// ---- The choice of a rule that reads values -----------------------------------------------------
// A block that begins in the shard, in the compute dtype.
struct BlockValues {
  std::int64_t rows, cols;
  float x[16][16];
};
template <class T>
void load_block(const PartialCast& cast, std::int64_t row, std::int64_t col, BlockValues& block) {
  const bool round = cast.compute == DType::kBFloat16;
  const T* master = static_cast<const T*>(cast.master);
  for (std::int64_t r = 0; r < block.rows; ++r) {
    const std::int64_t flat = (row + r) * cast.cols + col, left = cast.shard.end - flat;
    const std::int64_t here = std::clamp<std::int64_t>(left, 0, block.cols);
    for (std::int64_t c = 0; c < here; ++c)
      block.x[r][c] = computed(master[flat - cast.shard.begin + c], round);
    for (std::int64_t c = here; c < block.cols; ++c)
      block.x[r][c] = computed(cast.following[c - left], round);
  }
}

// Returns the error of a block under one of its scales.
template <class F>
float block_error(const BlockValues& block, const AmaxGrid& grid, const TensorScale& tensor,
                  const BlockScale& scale) {
  float lines[16] = {};
  for (std::int64_t r = 0; r < block.rows; ++r)
    for (std::int64_t c = 0; c < block.cols; ++c) {
      const float x = block.x[r][c];
      float& line = lines[grid.width == 1 ? 0 : r];
      line = line + squared_error<F>(tensor, scale.scale, encode_nearest<F>(x * scale.encode), x);
    }
  return add_rows(lines);
}

// Chooses the scales of one row of cells.
template <class F, class T>
void choose_row(const PartialCast& cast, const AmaxGrid& grid, std::int64_t cell_row) {
  const TensorScale tensor = tensor_scale<F>(cast, grid);
  const std::int64_t row = cell_row * grid.height;
  BlockValues block;
  block.rows = std::min(grid.height, cast.rows - row);
  for (std::int64_t i = 0; i < grid.cols; ++i) {
    std::uint32_t& amax = cast.amaxes[cell_row * grid.cols + i];
    const std::int64_t col = i * grid.width, flat = row * cast.cols + col;
    float errors[2] = {};
    if (cast.shard.begin <= flat && flat < cast.shard.end) {
      block.cols = std::min(grid.width, cast.cols - col);
      load_block<T>(cast, row, col, block);
      for (const std::uint32_t second : {0u, 1u})
        errors[second] = block_error<F>(
            block, grid, tensor, cell_scale<F>(cast.spec, tensor, amax | second * kSecondScale));
    }
    if (!takes_second(errors[0], errors[1])) amax |= kSecondScale;
  }
}

template <class F>
void store_scales(const PartialCast& cast) {
  const AmaxGrid grid = amax_grid(cast.spec, cast.columnwise, cast.rows, cast.cols);
  if (grid.cells() == 0) return;
  const TensorScale tensor = tensor_scale<F>(cast, grid);
  for (std::int64_t r = 0; r < grid.rows; ++r)
    for (std::int64_t c = 0; c < grid.cols; ++c) {
      const std::int64_t cell = r * grid.cols + c, at = cast.columnwise ? c * grid.rows + r : cell;
      const std::uint32_t amax = active_amax(cast, cell);
      if (cast.spec.scale_type() == ScaleType::kFloat32)
        static_cast<float*>(cast.scale)[at] = fp32_scale<F>(cast.spec, tensor, amax);
      else
        static_cast<std::uint8_t*>(cast.scale)[at] =
            static_cast<std::uint8_t>(cell_scale<F>(cast.spec, tensor, amax).code);
    }
  if (!cast.amax || cast.spec.rule == ScaleRule::kBlock || cast.spec.rule == ScaleRule::kMx) return;
  const std::int64_t first = grid.has_tensor_amax ? grid.cells() : 0;
  for (std::int64_t i = first; i < grid.count(); ++i)
    cast.amax[i - first] = bit_cast<float>(cast.amaxes[i]);
}

// ---- Codes --------------------------------------------------------------------------------------
// Stores two codes a byte. At the ends of the row's part a nibble may be another shard's.
MINIFLOAT_INLINE void store_nibbles(const PartialCast& cast, std::int64_t row, const Span& cols,
                                    const std::uint8_t* codes) {  // (cols.size())
  const FlatShard shard = {cast.cols, cast.shard};
  const Span bytes = shard.nibble_bytes_of_row(row);
  std::uint8_t* to = cast.codes - cast.first_byte;
  for (std::int64_t b = bytes.begin; b < bytes.end; ++b) {
    const std::uint8_t mask = shard.nibble_mask(b);
    const std::int64_t low = (cols.begin & ~std::int64_t{1}) + 2 * (b - bytes.begin) - cols.begin;
    const std::uint8_t pair = pack_nibbles(mask & 0x0F ? codes[low] : 0u,  //
                                           mask & 0xF0 ? codes[low + 1] : 0u);
    const bool is_end_of_odd_row = low + 1 + cols.begin >= cast.cols;  // its last nibble is padding
    const bool keeps =
        cast.keeps_other_nibbles && mask != 0xFF && !(is_end_of_odd_row && mask == 0x0F);
    to[b] = static_cast<std::uint8_t>((keeps ? to[b] & ~mask : 0) | pair);
  }
}

template <class F, class T>
struct BandCast {
  MINIFLOAT_INLINE static void run(const Band& band) {
    const PartialCast& cast = *band.cast;
    const FlatShard shard = {cast.cols, cast.shard};
    const bool round = cast.compute == DType::kBFloat16;
    const TensorScale tensor = tensor_scale<F>(cast, band.grid);
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(cast.cols));
    for (std::int64_t r = band.rows.begin; r < band.rows.end; ++r) {
      const Span cols = shard.cols_of_row(r);
      const T* row = static_cast<const T*>(cast.master) + (r * cast.cols - cast.shard.begin);
      std::uint8_t* out = codes.data() - cols.begin;
      each_cell(band.grid, r, cols, [&](std::int64_t cell, const Span& part) {
        const BlockScale scale = cell_scale<F>(cast.spec, tensor, active_amax(cast, cell));
        for (std::int64_t c = part.begin; c < part.end; ++c) {
          const float x = value_to_encode(computed(row[c], round), cast.spec.delayed);
          out[c] = static_cast<std::uint8_t>(encode_nearest<F>(x * scale.encode));
        }
        if (has_zero_codes(cast.spec.rule, scale.code))
          std::memset(out + part.begin, 0, static_cast<std::size_t>(part.size()));
      });
      if constexpr (F::kBits == 4)
        store_nibbles(cast, r, cols, codes.data());
      else
        std::memcpy(cast.codes + (r * cast.cols + cols.begin - cast.first_byte), codes.data(),
                    static_cast<std::size_t>(cols.size()));
    }
  }
};

template <class F>
void cast_band(const Band& band) {
  if (band.cast->dtype == DType::kFloat32)
    run_widest<BandCast<F, float>>(band);
  else
    run_widest<BandCast<F, std::uint16_t>>(band);
}

// ---- Transposes ---------------------------------------------------------------------------------
template <class T>
void transpose_rows(const Transpose& m, const Span& cols) {
  const T* from = static_cast<const T*>(m.from);
  T* to = static_cast<T*>(m.to);
  for (std::int64_t r = 0; r < m.rows; ++r)
    for (std::int64_t c = cols.begin; c < cols.end; ++c) to[c * m.rows + r] = from[r * m.cols + c];
}

}  // namespace

void partial_amax(std::span<const PartialCast> casts, const Execution& execution) {
  const std::vector<Band> bands = bands_of(casts);
  parallel_for(execution, static_cast<std::int64_t>(bands.size()), elements_of(casts),
               [&](std::int64_t i) {
                 const Band& band = bands[static_cast<std::size_t>(i)];
                 if (band.cast->dtype == DType::kFloat32)
                   run_widest<BandAmax<float>>(band);
                 else
                   run_widest<BandAmax<std::uint16_t>>(band);
               });
}

void choose_scales(std::span<const PartialCast> casts, const Execution& execution) {
  for (const PartialCast& cast : casts) {
    const AmaxGrid grid = amax_grid(cast.spec, cast.columnwise, cast.rows, cast.cols);
    parallel_for(execution, grid.rows, cast.rows * cast.cols, [&](std::int64_t row) {
      if (cast.dtype == DType::kFloat32)
        choose_row<E2M1, float>(cast, grid, row);
      else
        choose_row<E2M1, std::uint16_t>(cast, grid, row);
    });
  }
}

void partial_cast(std::span<const PartialCast> casts, const Execution& execution) {
  const std::vector<Band> bands = bands_of(casts);
  parallel_for(execution, static_cast<std::int64_t>(bands.size()), elements_of(casts),
               [&](std::int64_t i) {
                 const Band& band = bands[static_cast<std::size_t>(i)];
                 with_format(band.cast->spec.elements, [&]<class F>(F) { cast_band<F>(band); });
               });
  // Last, because under +delayed the codes are made with the amax that this replaces.
  std::int64_t cells = 0;
  for (const PartialCast& cast : casts) cells += cast.rows * cast.cols / 16;
  parallel_for(execution, static_cast<std::int64_t>(casts.size()), cells, [&](std::int64_t i) {
    const PartialCast& cast = casts[static_cast<std::size_t>(i)];
    with_format(cast.spec.elements, [&]<class F>(F) { store_scales<F>(cast); });
  });
}

void transpose_many(std::span<const Transpose> matrices, const Execution& execution) {
  constexpr std::int64_t kCols = 64;
  for (const Transpose& m : matrices) {
    if (m.rows * m.cols == 0) continue;
    if (m.bits == 4) {
      cpu::transpose_nibbles(
          {.codes = static_cast<const std::uint8_t*>(m.from), .rows = m.rows, .cols = m.cols},
          static_cast<std::uint8_t*>(m.to), execution);
      continue;
    }
    parallel_for(execution, ceil_div(m.cols, kCols), m.rows * m.cols, [&](std::int64_t i) {
      const Span cols = {i * kCols, std::min(m.cols, (i + 1) * kCols)};
      m.bits == 8 ? transpose_rows<std::uint8_t>(m, cols) : transpose_rows<std::uint32_t>(m, cols);
    });
  }
}

void copy_many(std::span<const Copy> copies, const Execution&) {
  for (const Copy& c : copies)
    if (!c.is_or && c.bytes > 0) std::memcpy(c.to, c.from, static_cast<std::size_t>(c.bytes));
  for (const Copy& c : copies)
    for (std::int64_t i = 0; c.is_or && i < c.bytes; ++i) c.to[i] |= c.from[i];
}

}  // namespace minifloat::cpu
