// The general casts to E2M1 whose scale rule reads a block's values.
#include "cuda/quantize/general.cuh"

namespace minifloat::cuda {

void launch_general_reading_values(const QuantizeArgs& args, const Execution& execution) {
  launch_cast<Cast<E2M1, true>>(args, execution);
}

}  // namespace minifloat::cuda
