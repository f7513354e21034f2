#include "layers/shard_casts.h"

#include <ATen/ATen.h>

#include <string>
#include <utility>
#include <vector>

namespace minifloat::torch_ops {
namespace {

// Returns whether a cast needs the amax of all ranks: of the tensor, or of rows that the ranks cut.
bool needs_amax_of_ranks(const PreparedRecipe& recipe, const OperandUse& needed, int cut) {
  const Spec& spec = recipe.specs[needed.place];
  if (!needed.is_needed || spec.is_bf16() || spec.delayed) return false;
  const int contraction = kOperands[needed.place].columnwise ? 0 : 1;
  return spec.has_tensor_amax() || (spec.has_row_amax() && cut == contraction);
}

QuantizedOperand quantize_direction(const Tensor& x, const std::string& text, bool columnwise,
                                    const QuantizeOptions& options) {
  return columnwise ? quantize(x, "", text, options).second : quantize(x, text, "", options).first;
}

// A rank's cut of each part, of `length`, along one dimension of the whole.
struct Cuts {
  const Sharding& sharding;
  SymInt length;

  SymInt begin(std::int64_t part) const { return length * (part * sharding.ranks + sharding.rank); }
  // Returns the cuts of a tensor of the whole, whose entries hold `unit` elements each. A tensor
  // that the operand lacks has no entries along `dim`; one of no tokens has.
  Tensor of(const Tensor& whole, std::int64_t dim, std::int64_t unit) const {
    if (!whole.defined() || whole.dim() < -dim || whole.sym_size(dim) == 0) return whole;
    std::vector<Tensor> parts;
    for (std::int64_t part = 0; part < sharding.parts; ++part)
      parts.push_back(whole.narrow_symint(dim, begin(part) / unit, length / unit));
    return at::cat(parts, dim);
  }
};

// Returns a rank's rows (-2) or columns (-1) of an operand. They hold whole blocks.
QuantizedOperand shard_of(const QuantizedOperand& whole, const Spec& spec, std::int64_t dim,
                          const Cuts& cuts) {
  const bool is_rows = dim == -2;
  QuantizedOperand out = whole;
  out.codes = cuts.of(whole.codes, dim, is_rows ? 1 : 8 / spec.code_bits());
  out.decoded = cuts.of(whole.decoded, dim, 1);
  const bool has_own_rows = spec.has_row_amax() && is_rows;
  if (spec.has_blocks())
    out.scale = cuts.of(whole.scale, dim, is_rows ? spec.block_rows : spec.block_cols);
  else if (has_own_rows)
    out.scale = cuts.of(whole.scale, -1, 1);
  if (has_own_rows) out.amax = cuts.of(whole.amax, -1, 1);
  return out;
}

QuantizedOperand quantize_within_whole(const Tensor& x, const Spec& spec, const std::string& text,
                                       bool columnwise, const QuantizeOptions& options,
                                       const Sharding& sharding, std::int64_t dim) {
  const Cuts cuts = {sharding, x.sym_size(dim) / sharding.parts};
  c10::SymDimVector shape(x.sym_sizes().begin(), x.sym_sizes().end());
  SymInt& size = shape[static_cast<std::size_t>(x.dim() + dim)];
  size = size * sharding.ranks;
  const Tensor whole = at::zeros_symint(shape, x.options());
  for (std::int64_t part = 0; part < sharding.parts; ++part)
    whole.narrow_symint(dim, cuts.begin(part), cuts.length)
        .copy_(x.narrow_symint(dim, cuts.length * part, cuts.length));
  return shard_of(quantize_direction(whole, text, columnwise, options), spec,
                  columnwise ? -3 - dim : dim, cuts);
}

}  // namespace

void place_shard(const PreparedRecipe& recipe, const Tensor& x, const OperandUse& row,
                 const OperandUse& col, const Sharding& sharding, int cut,
                 QuantizeOptions& options) {
  const bool is_tokens = kOperands[row.place].matrix == Matrix::kX && cut == 0;
  if (!is_tokens)
    options.origin[static_cast<std::size_t>(cut)] = x.sym_size(cut - 2) * sharding.rank;
  const bool of_row = needs_amax_of_ranks(recipe, row, cut) && !options.amax_row,
             of_col = needs_amax_of_ranks(recipe, col, cut) && !options.amax_col;
  const Spec &row_spec = recipe.specs[row.place], &col_spec = recipe.specs[col.place];
  if (of_row && of_col && row_spec.has_tensor_amax() && col_spec.has_tensor_amax() &&
      row_spec.transform == 0 && col_spec.transform == 0) {
    options.amax_row =
        largest_of_ranks(sharding, amax(x, recipe.spec_texts[row.place], false, options));
    options.amax_col = options.amax_row;
    return;
  }
  const auto own_amax = [&](const OperandUse& needed, bool columnwise) {
    return amax(x, recipe.spec_texts[needed.place], columnwise, options);
  };
  if (of_row) options.amax_row = own_amax(row, false);
  if (of_col) options.amax_col = own_amax(col, true);
  if (of_row && of_col) {
    const SymInt lengths[] = {options.amax_row->sym_numel(), options.amax_col->sym_numel()};
    const Tensor both = largest_of_ranks(
        sharding, at::cat({options.amax_row->reshape(-1), options.amax_col->reshape(-1)}));
    const std::vector<Tensor> apart = both.split_with_sizes_symint(lengths);
    options.amax_row = apart[0].view_symint(options.amax_row->sym_sizes());
    options.amax_col = apart[1].view_symint(options.amax_col->sym_sizes());
  } else if (of_row) {
    options.amax_row = largest_of_ranks(sharding, *options.amax_row);
  } else if (of_col) {
    options.amax_col = largest_of_ranks(sharding, *options.amax_col);
  }
}

Directions quantize_shard(const PreparedRecipe& recipe, const Tensor& x, const OperandUse& row,
                          const OperandUse& col, const CastPlan& plan, const Sharding& sharding,
                          int cut) {
  const bool is_of_experts = x.dim() == 3 || plan.options.groups.table;
  const auto reads_whole = [&](const OperandUse& needed, const std::string& text, bool columnwise) {
    const bool is_of_rows = cut == (columnwise ? 1 : 0);  // as read
    return !text.empty() && recipe.specs[needed.place].stochastic &&
           (sharding.parts > 1 || (is_of_experts && is_of_rows));
  };
  if (!reads_whole(row, plan.row, false) && !reads_whole(col, plan.col, true))
    return quantize(x, plan.row, plan.col, plan.options);
  const auto cast = [&](const OperandUse& needed, const std::string& text, bool columnwise) {
    if (text.empty()) return QuantizedOperand();
    QuantizeOptions options = plan.options;
    (columnwise ? options.amax_row : options.amax_col).reset();
    if (columnwise) options.row_ids.reset();
    if (!reads_whole(needed, text, columnwise))
      return quantize_direction(x, text, columnwise, options);
    options.origin = {0, 0};
    return quantize_within_whole(x, recipe.specs[needed.place], text, columnwise, options, sharding,
                                 cut - 2);
  };
  return {cast(row, plan.row, false), cast(col, plan.col, true)};
}

}  // namespace minifloat::torch_ops
