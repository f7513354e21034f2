#include "cuda/activation/quantize_gradients.cuh"

namespace minifloat::cuda {

bool launch_gradients_fp8(const GradientSpecs& specs, const GradientArgs& args,
                          const GradientPlans* plans, const Execution& execution) {
  return launch_gradients<preset::Formats::kFp8>(specs, args, plans, execution);
}

}  // namespace minifloat::cuda
