#include "ops/ops.h"

namespace minifloat::torch_ops {

EightTensors eight_tensors(const Directions& operands) {
  const auto& [r, c] = operands;
  return {r.codes, r.scale, r.amax, r.decoded, c.codes, c.scale, c.amax, c.decoded};
}

Directions both_of(const EightTensors& t) {
  const auto& [codes_row, scale_row, amax_row, decoded_row, codes_col, scale_col, amax_col,
               decoded_col] = t;
  return {{codes_row, scale_row, amax_row, decoded_row},
          {codes_col, scale_col, amax_col, decoded_col}};
}

QuantizeOptions options_of(const char* op, const std::optional<Tensor>& amax_row,
                           const std::optional<Tensor>& amax_col, const std::optional<Tensor>& rng,
                           std::int64_t stream_row, std::int64_t stream_col,
                           c10::SymIntArrayRef origin, bool decoded_row, bool decoded_col) {
  TORCH_CHECK_VALUE(origin.size() == 2, op, ": expected origin as (row, column), got ",
                    origin.size(), " numbers");
  return {.amax_row = amax_row,
          .amax_col = amax_col,
          .rng = rng,
          .stream_row = stream_row,
          .stream_col = stream_col,
          .decoded_row = decoded_row,
          .decoded_col = decoded_col,
          .origin = {origin[0], origin[1]}};
}

}  // namespace minifloat::torch_ops
