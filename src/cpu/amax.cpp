// max |x| of each row as read, over panels of kTileRows rows. One thread takes a panel, so that no
// maximum is shared. A tensor's amax is the largest of its rows'. All on bit patterns: NaN
// survives.
#include <algorithm>
#include <vector>

#include "backends.h"
#include "grouped.h"
#include "minifloat/core/scaling.h"
#include "parallel.h"
#include "tile.h"

namespace minifloat::cpu {
namespace {

struct PanelArgs {
  const TensorRef* x;
  bool columnwise;
  int points;
  HadamardSigns signs;
  std::int64_t batch, first, rows, cols;  // rows as read [first, first + rows), all cols
  std::uint32_t* out;                     // (rows)
};

MINIFLOAT_INLINE std::uint32_t magnitude_of(float x) { return magnitude_bits(x); }
MINIFLOAT_INLINE std::uint32_t magnitude_of(std::uint16_t x) { return (x & 0x7FFFu) << 16; }

template <class T>
struct Panel {
  MINIFLOAT_INLINE static void run(const PanelArgs& args) {
    if (args.points > 0) return transformed(args);
    const T* x = static_cast<const T*>(args.x->data) + args.batch * args.x->batch_stride;
    if (args.columnwise)
      columns(args, x);
    else
      rows(args, x);
  }

  MINIFLOAT_INLINE static void rows(const PanelArgs& args, const T* x) {
    for (std::int64_t r = 0; r < args.rows; ++r) {
      const T* row = x + (args.first + r) * args.x->row_stride;  // (cols)
      std::uint32_t m = 0;
      for (std::int64_t c = 0; c < args.cols; ++c) {
        const std::uint32_t v = magnitude_of(row[c]);
        m = v > m ? v : m;
      }
      args.out[r] = m;
    }
  }

  MINIFLOAT_INLINE static void columns(const PanelArgs& args, const T* x) {
    std::uint32_t m[kTileRows] = {};
    for (std::int64_t c = 0; c < args.cols; ++c) {
      const T* row = x + c * args.x->row_stride + args.first;  // (rows)
      for (std::int64_t r = 0; r < args.rows; ++r) {
        const std::uint32_t v = magnitude_of(row[r]);
        m[r] = v > m[r] ? v : m[r];
      }
    }
    for (std::int64_t r = 0; r < args.rows; ++r) args.out[r] = m[r];
  }

  MINIFLOAT_INLINE static void transformed(const PanelArgs& args) {
    TileMemory memory;
    for (std::int64_t r = 0; r < args.rows; ++r) args.out[r] = 0;
    for (std::int64_t col = 0; col < args.cols; col += kTileCols) {
      const TileRange range = {args.batch, args.first, col, args.rows,
                               args.cols - col < kTileCols ? args.cols - col : kTileCols};
      const LoadArgs load = {args.x, args.columnwise, args.points, args.signs, &range, &memory};
      const TileView<std::uint16_t> tile = LoadTransformedTile<T>::run(load);
      for (std::int64_t r = 0; r < args.rows; ++r) {
        const std::uint16_t* row = tile.row(r);
        std::uint16_t m = 0;
        for (std::int64_t c = 0; c < kTileCols; ++c) {
          const std::uint16_t v = row[c] & 0x7FFFu;
          m = v > m ? v : m;
        }
        args.out[r] = std::max(args.out[r], static_cast<std::uint32_t>(m) << 16);
      }
    }
  }
};

// Returns the amax of each row as read, (batch, rows).
std::vector<std::uint32_t> row_amax(const TensorRef& x, const AmaxOf& of, bool columnwise,
                                    const Execution& execution) {
  const int points = of.spec.transform;
  const HadamardSigns signs = signs_of(of.spec, of.random);
  const std::int64_t rows = columnwise ? x.cols : x.rows, cols = columnwise ? x.rows : x.cols;
  std::vector<std::uint32_t> out(static_cast<std::size_t>(x.batch * rows));
  const std::int64_t panels = ceil_div(rows, kTileRows);
  parallel_for(execution, x.batch * panels, x.batch * rows * cols, [&](std::int64_t i) {
    const std::int64_t batch = i / panels, first = i % panels * kTileRows;
    const PanelArgs args = {&x,
                            columnwise,
                            points,
                            signs,
                            batch,
                            first,
                            std::min(kTileRows, rows - first),
                            cols,
                            out.data() + batch * rows + first};
    if (x.dtype == DType::kFloat32)
      run_widest<Panel<float>>(args);
    else
      run_widest<Panel<std::uint16_t>>(args);
  });
  return out;
}

}  // namespace

void amax(const TensorRef& x, const AmaxOf& of, float* out, const Execution& execution) {
  const Spec& spec = of.spec;
  const bool columnwise = of.columnwise;
  if (x.rows_from) return cpu::amax(GatheredRows(x).x(), of, out, execution);
  if (x.groups)
    return each_group(x.groups, [&](const Group& group) {
      const std::int64_t first = first_amax(spec, group, columnwise ? x.cols : x.rows, columnwise);
      cpu::amax(rows_of(x, group), of, out + first, execution);
    });
  if (!spec.has_row_amax() && x.rows * x.cols == 0) {
    std::fill_n(out, x.batch, 0.0f);
    return;
  }
  // Without a transform a tensor's amax is the same in both directions, and reading rows is faster.
  const bool by_column = columnwise && (spec.has_row_amax() || spec.transform > 0);
  const std::vector<std::uint32_t> rows = row_amax(x, of, by_column, execution);
  if (spec.has_row_amax()) {
    for (std::size_t r = 0; r < rows.size(); ++r) out[r] = bit_cast<float>(rows[r]);
    return;
  }
  const std::size_t per_matrix =
      rows.size() / static_cast<std::size_t>(std::max<std::int64_t>(x.batch, 1));
  for (std::int64_t e = 0; e < x.batch; ++e) {
    const auto first = rows.begin() + e * static_cast<std::int64_t>(per_matrix);
    std::uint32_t m = 0;
    for (auto r = first; r != first + static_cast<std::int64_t>(per_matrix); ++r)
      m = std::max(m, *r);
    out[e] = bit_cast<float>(m);
  }
}

}  // namespace minifloat::cpu
