// The casts to E4M3.
#include "cuda/quantize/general.cuh"

namespace minifloat::cuda {

void launch_cast_e4m3(const QuantizeArgs& args, bool columnwise, const Execution& execution) {
  launch_cast<E4M3>(args, columnwise, execution);
}

}  // namespace minifloat::cuda
