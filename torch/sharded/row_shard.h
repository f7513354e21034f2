// RowShard: one direction of a weight W (n, cols) that FSDP2 cuts by rows, on one rank.
//
//     W (n, cols)   rank 0  ███████████     chunks of ⌈n / world⌉ rows, the last one short or empty
//                   rank 1  ███████████
//                   rank 2  ████
//     blocks        ├───┤├───┤├───┤├─┤     a block of rows of two ranks needs the amaxes of both
//
// A rank casts a window of W as if the window were a weight: the rank's rows, grown to whole
// blocks; all of W where rows share a scale. Codes are gathered in W's row order, and so are the
// scales of blocks: a table of the blocks that begin in a shard. All other scales are computed on
// every rank from amaxes that the ranks exchange.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "sharded/shard_cast.h"

namespace minifloat::torch_ops {

// A range of `count` amaxes, which starts at `exchanged` among the exchanged numbers and at
// `packed` among the window's.
struct AmaxRange {
  std::int64_t exchanged, packed, count;
};

class RowShard {
 public:
  // world, rank: of the ranks over which W's rows are cut
  RowShard(const ShardCast& whole, std::int64_t world, std::int64_t rank);

  const Spec& spec() const { return whole_.spec(); }
  bool columnwise() const { return whole_.columnwise(); }
  std::int64_t rows() const { return whole_.rows(); }
  std::int64_t cols() const { return whole_.cols(); }
  std::int64_t world() const { return world_; }

  // Rows of W: of a chunk, the first one of a rank and of this rank, the number on this rank.
  std::int64_t chunk() const { return chunk_; }
  std::int64_t begin_of(std::int64_t rank) const { return std::min(rank * chunk_, rows()); }
  std::int64_t start() const { return begin_of(rank_); }
  std::int64_t held_rows() const { return begin_of(rank_ + 1) - start(); }

  bool is_transformed() const { return spec().transform > 0; }
  // Returns whether every rank computes the scales from exchanged amaxes, so that no table of
  // scales is gathered.
  bool has_common_scale() const;
  // Returns whether each shard can be cast without the others: no transform reaches over the end of
  // a shard, nor does a block whose scale is chosen by its values.
  bool fits() const { return fits_; }

  // Codes in W's row order, with the padding of transforms: bytes of a row, of W, of a chunk, of
  // this rank's rows.
  std::int64_t grown(std::int64_t rows) const { return round_up(rows, transform_rows()); }
  std::int64_t row_bytes() const;
  std::int64_t whole_bytes() const { return grown(rows()) * row_bytes(); }
  std::int64_t chunk_bytes() const { return grown(chunk_) * row_bytes(); }
  std::int64_t held_bytes() const { return grown(held_rows()) * row_bytes(); }

  // The window as a matrix, and the shard's first element in the window.
  const ShardCast& window() const { return window_; }
  std::int64_t first_element() const;

  // The amaxes that ranks exchange: their number, and the ranges that this rank's window holds.
  std::int64_t exchanged() const { return exchanged_; }
  const std::vector<AmaxRange>& exchanged_ranges() const { return ranges_; }

  // The table of scales: rows of a rank, of W and of this rank (from `table_first` of the window
  // on); bytes of a row.
  std::int64_t table_rows() const { return ceil_div(grown(chunk_), block_rows()); }
  std::int64_t whole_table_rows() const { return ceil_div(grown(rows()), block_rows()); }
  std::int64_t table_rows_of(std::int64_t rank) const;
  std::int64_t table_rows_of_this_rank() const { return table_rows_of(rank_); }
  std::int64_t table_first() const {
    return ceil_div(start(), block_rows()) - window_first_block();
  }
  std::int64_t table_cols() const;
  int scale_bytes() const { return spec().scale_type() == ScaleType::kFloat32 ? 4 : 1; }
  std::int64_t table_row_bytes() const { return table_cols() * scale_bytes(); }
  std::int64_t table_bytes() const;  // of a rank; 0: none is gathered
  // A table of rows has a scale and an amax for each row of W, first all scales of the rank.
  bool has_row_table() const { return !spec().has_blocks() && !has_common_scale(); }

  // Sizes of the scale and the amax that each rank computes for the whole W, as read.
  std::int64_t common_scales() const;
  std::int64_t common_amaxes() const;

 private:
  std::int64_t block_rows() const;      // rows of W that share a scale; 1 without blocks
  std::int64_t transform_rows() const;  // rows of W that a transform mixes; 1: none
  std::vector<std::int64_t> split_blocks(std::int64_t rows) const;
  void find_exchanged();
  Span window_rows() const;
  std::int64_t window_first_block() const { return window_rows().begin / block_rows(); }

  ShardCast whole_;
  std::int64_t world_, rank_, chunk_;
  ShardCast window_;
  bool fits_;
  std::int64_t exchanged_ = 0;
  std::vector<AmaxRange> ranges_;
};

}  // namespace minifloat::torch_ops
