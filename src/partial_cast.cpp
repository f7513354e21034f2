// minifloat/partial_cast.h: the geometry, and the checks before a backend is called.
#include "minifloat/partial_cast.h"

#include <utility>
#include <vector>

#include "backends.h"
#include "memory_checks.h"
#include "minifloat/error.h"
#include "on_device.h"
#include "quantize_checks.h"

namespace minifloat {
namespace {

// Checks that the values of every block that begins in a shard are there.
void check_blocks(const char* function, const PartialCast& cast, Memory& memory) {
  if (cast.shard.empty()) return;
  const AmaxGrid grid = amax_grid(cast.spec, cast.columnwise, cast.rows, cast.cols);
  const WeightBlocks blocks = {cast.rows, cast.cols, grid.height, grid.width};
  if (!blocks.are_split(cast.shard.end)) return;
  const std::int64_t following = blocks.around(cast.shard.end).end - cast.shard.end;
  if (cast.following)
    return memory.reads("the values that follow", cast.following, following * 4, 4);
  MINIFLOAT_CHECK(
      false, function, ": ", cast.spec.str(),
      " reads the values of whole blocks; expected a shard that ends between blocks of ",
      grid.height, " x ", grid.width, ", or the values that follow it, got [", cast.shard.begin,
      ", ", cast.shard.end, ") of ", cast.rows, " x ", cast.cols);
}

// Checks all that a cast reads besides amaxes.
void check_shard(const char* function, const PartialCast& cast, Memory& memory) {
  const Spec& spec = cast.spec;
  check_spec(function, spec);
  check_dtype(function, cast.dtype);
  check_dtype(function, cast.compute);
  MINIFLOAT_CHECK(!spec.is_bf16() && !spec.stochastic && spec.transform == 0, function,
                  ": expected a spec that rounds to nearest without a transform, got ", spec.str());
  MINIFLOAT_CHECK(is_addressable({cast.rows, cast.cols}), function,
                  ": expected sizes of zero or more, 2^48 elements at most, got ", cast.rows, " x ",
                  cast.cols);
  MINIFLOAT_CHECK(
      cast.shard.empty() || (cast.shard.begin >= 0 && cast.shard.end <= cast.rows * cast.cols),
      function, ": expected a shard within the ", cast.rows * cast.cols,
      " elements of the weight, got [", cast.shard.begin, ", ", cast.shard.end, ")");
  MINIFLOAT_CHECK(cast.shard.empty() || cast.master, function,
                  ": expected the values of a shard of ", cast.shard.size(), ", got null");
  memory.reads("the master", cast.master, cast.shard.size() * size_of(cast.dtype),
               size_of(cast.dtype));
}

void check_cast(const char* function, const PartialCast& cast, Memory& memory) {
  check_shard(function, cast, memory);
  MINIFLOAT_CHECK(cast.amaxes || cast.rows * cast.cols == 0, function,
                  ": expected memory for amaxes, got null");
  if (cast.rows * cast.cols > 0)
    memory.writes("amaxes", cast.amaxes,
                  amax_grid(cast.spec, cast.columnwise, cast.rows, cast.cols).count() * 4, 4);
}

void choose_on([[maybe_unused]] Device device, std::span<const PartialCast> casts,
               const Execution& execution) {
  if (casts.empty()) return;
  MINIFLOAT_ON(device, choose_scales(casts, execution));
}

// Returns the casts whose scales are still to be chosen. Each is of a whole weight, so that no
// other rank chooses any.
std::vector<PartialCast> casts_to_choose(std::span<const PartialCast> casts) {
  std::vector<PartialCast> chosen;
  for (const PartialCast& cast : casts) {
    if (!cast.spec.reads_values() || cast.has_chosen_scales) continue;
    const std::int64_t elements = cast.rows * cast.cols;
    MINIFLOAT_CHECK(cast.shard.size() == elements, "partial_cast: ", cast.spec.str(),
                    " reads the values of every block; expected chosen scales, or a shard of all ",
                    elements, " elements, got [", cast.shard.begin, ", ", cast.shard.end, ")");
    chosen.push_back(cast);
  }
  return chosen;
}

void check_outputs(const PartialCast& cast, Memory& memory) {
  const bool any = cast.rows * cast.cols > 0;
  MINIFLOAT_CHECK(cast.scale || !any, "partial_cast: expected a scale buffer, got null");
  MINIFLOAT_CHECK(cast.codes || cast.shard.empty(), "partial_cast: expected codes, got null");
  MINIFLOAT_CHECK(cast.amax || !cast.spec.delayed, "partial_cast: ", cast.spec.str(),
                  " needs the active amax, got null");
  const Span bytes = FlatShard{cast.cols, cast.shard}.code_bytes(cast.spec.code_bits());
  MINIFLOAT_CHECK(bytes.empty() || (0 <= cast.first_byte && cast.first_byte <= bytes.begin),
                  "partial_cast: expected codes from byte ", bytes.begin, " on, got from ",
                  cast.first_byte);
  if (!any) return;
  const Spec& spec = cast.spec;
  const AmaxGrid grid = amax_grid(spec, cast.columnwise, cast.rows, cast.cols);
  if (!bytes.empty()) memory.writes("codes", cast.codes, bytes.end - cast.first_byte);
  memory.writes("scales", cast.scale, grid.cells() * spec.scale_bytes(), spec.scale_bytes());
  const std::int64_t amaxes = spec.has_row_amax() ? grid.cells() : spec.has_tensor_amax() ? 1 : 0;
  if (cast.amax) memory.writes("amaxes of parts", cast.amax, amaxes * 4, 4);
}

}  // namespace

AmaxGrid amax_grid(const Spec& spec, bool columnwise, std::int64_t rows, std::int64_t cols) {
  AmaxGrid grid;
  check_spec("amax_grid", spec);
  check_sizes("amax_grid", 1, rows, cols);
  MINIFLOAT_CHECK(!spec.has_outer_row_amax(), "amax_grid: expected a format of weights, got ",
                  spec.str(), ", a format of tokens and gradients");
  if (rows == 0 || cols == 0) return grid;
  grid.height = spec.has_blocks() ? spec.block_rows : spec.has_row_amax() ? 1 : rows;
  grid.width = spec.has_blocks() ? spec.block_cols : cols;
  if (columnwise && spec.has_blocks()) std::swap(grid.height, grid.width);
  if (columnwise && spec.has_row_amax()) grid.height = rows, grid.width = 1;
  grid.rows = ceil_div(rows, grid.height);
  grid.cols = ceil_div(cols, grid.width);
  grid.has_tensor_amax = spec.has_outer_amax();
  return grid;
}

void check_partial_casts(std::span<const PartialCast> casts) {
  Memory memory("partial_cast");
  for (const PartialCast& cast : casts) {
    check_shard("partial_cast", cast, memory);
    check_outputs(cast, memory);
  }
  memory.require_apart();
}

void partial_amax(std::span<const PartialCast> casts, Device device, const Execution& execution) {
  check_device("partial_amax", device);
  Memory memory("partial_amax");
  for (const PartialCast& cast : casts) check_cast("partial_amax", cast, memory);
  memory.require_apart();
  MINIFLOAT_ON(device, partial_amax(casts, execution));
}

void choose_scales(std::span<const PartialCast> casts, Device device, const Execution& execution) {
  check_device("choose_scales", device);
  std::vector<PartialCast> read;
  Memory memory("choose_scales");
  for (const PartialCast& cast : casts) {
    check_cast("choose_scales", cast, memory);
    if (cast.spec.reads_values()) {
      check_blocks("choose_scales", cast, memory);
      read.push_back(cast);
    }
  }
  memory.require_apart();
  choose_on(device, read, execution);
}

void partial_cast(std::span<const PartialCast> casts, Device device, const Execution& execution) {
  check_device("partial_cast", device);
  Memory memory("partial_cast");
  for (const PartialCast& cast : casts) {
    check_cast("partial_cast", cast, memory);
    check_outputs(cast, memory);
  }
  memory.require_apart();
  choose_on(device, casts_to_choose(casts), execution);
  MINIFLOAT_ON(device, partial_cast(casts, execution));
}

void transpose_many(std::span<const Transpose> matrices, Device device,
                    const Execution& execution) {
  check_device("transpose_many", device);
  Memory memory("transpose_many");
  for (const Transpose& m : matrices) {
    MINIFLOAT_CHECK(m.bits == 4 || m.bits == 8 || m.bits == 32,
                    "transpose_many: expected elements of 4, 8 or 32 bits, got ", m.bits);
    MINIFLOAT_CHECK(is_addressable({m.rows, m.cols}),
                    "transpose_many: expected sizes of zero or more, 2^48 elements at most, got ",
                    m.rows, " x ", m.cols);
    const auto bytes = [&](std::int64_t rows, std::int64_t cols) {
      return rows * ceil_div<std::int64_t>(cols * m.bits, 8);
    };
    memory.reads("a matrix", m.from, bytes(m.rows, m.cols), m.bits == 32 ? 4 : 1);
    memory.writes("its transpose", m.to, bytes(m.cols, m.rows), m.bits == 32 ? 4 : 1);
  }
  memory.require_apart();
  MINIFLOAT_ON(device, transpose_many(matrices, execution));
}

void copy_many(std::span<const Copy> copies, Device device, const Execution& execution) {
  check_device("copy_many", device);
  Memory memory("copy_many");
  for (const Copy& c : copies) {  // of two, both may write the same bytes to one place
    check_size("copy_many", "bytes", c.bytes);
    memory.reads("bytes", c.from, c.bytes);
    memory.writes("their copy", c.to, c.bytes);
    memory.require_apart();
  }
  MINIFLOAT_ON(device, copy_many(copies, execution));
}

}  // namespace minifloat
