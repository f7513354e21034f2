#include "sharded/row_shard.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>

namespace minifloat::torch_ops {

RowShard::RowShard(const ShardCast& whole, std::int64_t world, std::int64_t rank)
    : whole_(whole),
      world_(world),
      rank_(rank),
      chunk_(ceil_div(whole.rows(), std::max<std::int64_t>(world, 1))),
      window_(whole) {
  TORCH_CHECK_VALUE(0 <= rank && rank < world && world <= (1 << 20),
                    "a shard of rows: expected a rank below a world of 1 to 2^20, got ", rank,
                    " of ", world);
  TORCH_CHECK_VALUE(!spec().is_bf16() && !spec().stochastic,
                    "a shard of rows: expected a spec with codes that rounds to nearest, got ",
                    spec().str());
  window_ = ShardCast(spec(), columnwise(), window_rows().size(), whole.cols(), whole.compute());
  const bool is_cut = !split_blocks(transform_rows()).empty();
  const bool needs_whole_blocks = is_transformed() || spec().reads_values();
  fits_ = !is_cut && !(needs_whole_blocks && !split_blocks(block_rows()).empty());
  find_exchanged();
}

// ---- Rows ---------------------------------------------------------------------------------------
std::int64_t RowShard::block_rows() const {
  if (!spec().has_blocks()) return 1;
  return columnwise() ? spec().block_cols : spec().block_rows;
}

std::int64_t RowShard::transform_rows() const {
  return columnwise() && is_transformed() ? spec().transform : 1;
}

// Returns the blocks of `rows` rows that more than one rank holds part of.
std::vector<std::int64_t> RowShard::split_blocks(std::int64_t rows) const {
  std::set<std::int64_t> found;
  for (std::int64_t rank = 1; rank < world_; ++rank) {
    const std::int64_t cut = begin_of(rank);
    if (cut % rows != 0 && cut < whole_.rows()) found.insert(cut / rows);
  }
  return {found.begin(), found.end()};
}

bool RowShard::has_common_scale() const {
  const bool is_of_shard_rows = is_transformed() && spec().has_row_amax() && !columnwise();
  return !spec().has_blocks() && !is_of_shard_rows;
}

Span RowShard::window_rows() const {
  const std::int64_t block = block_rows(), n = rows();
  if (!spec().has_blocks()) return {0, n};
  const std::int64_t begin = start(), end = begin_of(rank_ + 1);
  if (begin == end) return {0, std::min(block, n)};  // for the tensor's amax
  return {begin / block * block, std::min(round_up(end, block), n)};
}

std::int64_t RowShard::first_element() const {
  return held_rows() == 0 ? 0 : (start() - window_rows().begin) * cols();
}

std::int64_t RowShard::row_bytes() const {
  if (!columnwise()) return spec().code_cols(cols());
  return ceil_div<std::int64_t>(cols() * spec().code_bits(), 8);
}

// ---- Amaxes -------------------------------------------------------------------------------------
void RowShard::find_exchanged() {
  if (is_transformed()) {
    const bool is_shared = spec().has_tensor_amax() || (spec().has_row_amax() && columnwise());
    if (!spec().delayed && is_shared) exchanged_ = spec().has_tensor_amax() ? 1 : cols();
    return;
  }
  const AmaxGrid grid = amax_grid(spec(), columnwise(), window_.rows(), window_.cols());
  if (!spec().has_blocks()) {
    exchanged_ = grid.count();
    ranges_ = {{0, 0, exchanged_}};
    return;
  }
  const std::int64_t first = window_first_block();
  for (const std::int64_t block : split_blocks(block_rows())) {
    if (first <= block && block < first + grid.rows)
      ranges_.push_back({exchanged_, (block - first) * grid.cols, grid.cols});
    exchanged_ += grid.cols;
  }
  if (grid.has_tensor_amax) ranges_.push_back({exchanged_++, grid.cells(), 1});
}

// ---- Scales -------------------------------------------------------------------------------------
std::int64_t RowShard::table_cols() const {
  if (has_common_scale()) return 0;
  if (has_row_table()) return 1;
  return columnwise() ? ceil_div<std::int64_t>(cols(), spec().block_rows)
                      : spec().scale_cols(cols());
}

std::int64_t RowShard::table_bytes() const {
  if (has_common_scale()) return 0;
  return table_rows() * table_row_bytes() * (has_row_table() ? 2 : 1);
}

std::int64_t RowShard::table_rows_of(std::int64_t rank) const {
  const std::int64_t n = grown(rows()), chunk = grown(chunk_);
  const auto blocks_before = [&](std::int64_t r) {
    return ceil_div(std::min(r * chunk, n), block_rows());
  };
  return blocks_before(rank + 1) - blocks_before(rank);
}

std::int64_t RowShard::common_scales() const {
  if (!has_common_scale()) return 0;
  return spec().has_tensor_amax() ? 1 : columnwise() ? cols() : rows();
}

std::int64_t RowShard::common_amaxes() const {
  if (spec().has_tensor_amax()) return 1;
  return has_common_scale() ? common_scales() : 0;
}

}  // namespace minifloat::torch_ops
