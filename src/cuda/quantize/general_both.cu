// The pairs of directions that layers use, each from one read of x: weights and FP8 activations
// (the same format both ways), NVFP4's and MXFP4's activations (columnwise transformed) and
// gradients (stochastic, columnwise transformed).
#include "cuda/quantize/general.cuh"

namespace minifloat::cuda {
namespace {

template <class F>
using Nearest = Cast<F, false, false>;
using TransformedNearest = Cast<E2M1, false, true>;
using Random = Cast<E2M1, true, false>;
using TransformedRandom = Cast<E2M1, true, true>;

template <class Row, class Col>
bool launch_pair(const QuantizeArgs& args, const Execution& execution) {
  if (!is_cast<Row>(args.row_spec) || !is_cast<Col>(args.col_spec)) return false;
  launch_tiles<Bf16, Row, Col>(args, execution);
  return true;
}

}  // namespace

bool launch_both(const QuantizeArgs& args, const Execution& execution) {
  if (!args.is_bf16) return false;
  return launch_pair<Nearest<E4M3>, Nearest<E4M3>>(args, execution) ||
         launch_pair<Nearest<E5M2>, Nearest<E5M2>>(args, execution) ||
         launch_pair<Nearest<E2M1>, Nearest<E2M1>>(args, execution) ||
         launch_pair<Nearest<E2M1>, TransformedNearest>(args, execution) ||
         launch_pair<Random, TransformedRandom>(args, execution) ||
         launch_pair<TransformedRandom, TransformedRandom>(args, execution);
}

}  // namespace minifloat::cuda
