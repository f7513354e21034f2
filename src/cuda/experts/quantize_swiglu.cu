// Casts of h from gate and up, without h in memory: the choice of the kernel.
#include "cuda/experts/quantize_swiglu.h"

#include "cuda/experts/experts.h"
#include "cuda/experts/swiglu.cuh"
#include "cuda/quantize/quantize.h"

namespace minifloat::cuda {
namespace {

bool launch(const QuantizeArgs& args, bool rowwise, bool columnwise, const void* context,
            const Execution& execution) {
  const SwiGluArgs& of = *static_cast<const SwiGluArgs*>(context);
  if (columnwise) return launch_swiglu_tiles(of, args, rowwise, execution);
  return launch_swiglu_whole_rows(of, args, execution) || launch_swiglu_rows(of, args, execution);
}

}  // namespace

bool quantize_swiglu_in_one(const SwiGlu& of, const Operand* rowwise, const Operand* columnwise,
                            const Execution& execution) {
  const SwiGluArgs args = args_of(of);
  if (of.dtype != DType::kBFloat16 || of.width % kVec != 0 || !args.is_aligned) return false;
  return quantize_by(of.h_at(of.gate), rowwise, columnwise, launch, &args, execution);
}

}  // namespace minifloat::cuda
