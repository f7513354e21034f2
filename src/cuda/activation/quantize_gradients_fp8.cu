#include "cuda/activation/quantize_gradients.cuh"

namespace minifloat::cuda {

LaunchGradients find_gradients_fp8(const GradientSpecs& specs) {
  return find_gradients<preset::Formats::kFp8>(specs);
}

}  // namespace minifloat::cuda
