// Every cast to E2M1.
#include "cuda/quantize/general.cuh"

namespace minifloat::cuda {

void launch_cast_e2m1(const QuantizeArgs& args, bool columnwise, const Execution& execution) {
  launch_cast<E2M1>(args, columnwise, execution);
}

}  // namespace minifloat::cuda
