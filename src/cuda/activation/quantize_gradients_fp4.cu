#include "cuda/activation/quantize_gradients.cuh"

namespace minifloat::cuda {

bool launch_gradients_fp4(const GradientSpecs& specs, const GradientArgs& args,
                          const GradientPlans* plans, const Execution& execution) {
  return launch_gradients<preset::Formats::kWithFp4>(specs, args, plans, execution);
}

}  // namespace minifloat::cuda
