// The casts to E5M2.
#include "cuda/quantize/general.cuh"

namespace minifloat::cuda {

void launch_cast_e5m2(const QuantizeArgs& args, bool columnwise, const Execution& execution) {
  launch_cast<E5M2>(args, columnwise, execution);
}

}  // namespace minifloat::cuda
