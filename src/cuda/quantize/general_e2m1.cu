// The casts to E2M1 whose scale rule needs amaxes only.
#include "cuda/quantize/general.cuh"

namespace minifloat::cuda {

void launch_cast_e2m1(const QuantizeArgs& args, bool columnwise, const Execution& execution) {
  if ((columnwise ? args.col_spec : args.row_spec).reads_values())
    return launch_cast_e2m1_by_values(args, columnwise, execution);
  launch_cast<E2M1>(args, columnwise, execution);
}

}  // namespace minifloat::cuda
