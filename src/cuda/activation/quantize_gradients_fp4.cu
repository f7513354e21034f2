#include "cuda/activation/quantize_gradients.cuh"

namespace minifloat::cuda {

LaunchGradients find_gradients_fp4(const GradientSpecs& specs) {
  return find_gradients<preset::Formats::kWithFp4>(specs);
}

}  // namespace minifloat::cuda
