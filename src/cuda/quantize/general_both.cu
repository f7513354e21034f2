// The pairs of directions that layers use, each from one read of x: weights and FP8 activations
// (the same format both ways), NVFP4's and MXFP4's activations (columnwise transformed) and
// gradients (stochastic, columnwise transformed).
#include "cuda/quantize/general.cuh"

namespace minifloat::cuda {
namespace {

template <class Row, class Col>
bool launch_pair(const QuantizeArgs& args, const Execution& execution) {
  if (!is_cast<Row>(args.row_spec) || !is_cast<Col>(args.col_spec)) return false;
  launch_tiles<Bf16, Row, Col>(args, execution);
  return true;
}

}  // namespace

bool launch_both(const QuantizeArgs& args, const Execution& execution) {
  if (!args.is_bf16) return false;
  return launch_pair<NearestCast<E4M3>, NearestCast<E4M3>>(args, execution) ||
         launch_pair<NearestCast<E5M2>, NearestCast<E5M2>>(args, execution) ||
         launch_pair<NearestCast<E2M1>, NearestCast<E2M1>>(args, execution) ||
         launch_pair<NearestCast<E2M1>, TransformedNearestCast>(args, execution) ||
         launch_pair<RandomCast, TransformedRandomCast>(args, execution) ||
         launch_pair<TransformedRandomCast, TransformedRandomCast>(args, execution);
}

}  // namespace minifloat::cuda
